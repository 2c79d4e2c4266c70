"""Plans equal what can be counted by hand, and the command works as users call it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_asyncpp.cli import main as asyncpp
from lightning_asyncpp.core.schedule import Schedule, Slack, StalenessRule
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.tools.plan.fake_tensors import FAKE, Meter, Reading, bytes_of, drop_memory
from lightning_asyncpp.tools.plan.plan import main
from lightning_asyncpp.tools.plan.profile import Profile, peak_of
from tests.tools.plan.cases import ADAMW, SGD, Case, feedback

RECIPES = Path(__file__).parents[3] / "recipes"
TINY: dict[str, Any] = {"vocab_size": 64, "context_length": 16, "num_layers": 2, "dim": 32, "num_heads": 2}


def test_what_is_kept_moved_and_multiplied_is_known_by_hand() -> None:
    with FAKE, Meter() as meter:
        x, w = torch.zeros(8, 16), torch.zeros(16, 4, requires_grad=True)
        with meter.reading() as forward:
            y = (x @ w).relu()  # both results exist at once; relu keeps its own, the product is freed
        with meter.reading() as backward:
            y.sum().backward()
        assert (forward.kept, forward.peak) == (8 * 4 * 4, 2 * 8 * 4 * 4)
        assert forward.moved == 4 * (8 * 16 + 16 * 4 + 8 * 4) + 4 * (8 * 4 + 8 * 4)
        assert forward.flops == backward.flops == 2 * 8 * 16 * 4
        assert w.grad is not None
        with meter.reading() as update:
            w.detach().add_(w.grad)
        assert (update.moved, update.kept) == (2 * 16 * 4 * 4, 0)
    x = torch.zeros(10, 10)
    assert bytes_of([x, x[:2], x.T, torch.zeros(3)]) == 400 + 12


@pytest.mark.parametrize("moe", [None, {"num_experts": 8, "top_k": 2, "expert_dim": 24}], ids=["dense", "experts"])
def test_operations_of_a_gpt_are_what_its_config_says(moe: Any) -> None:
    """Operations equal those of the config, in which only a token's active experts count."""
    config = GPTConfig(vocab_size=96, context_length=32, num_layers=2, dim=32, num_heads=4, num_kv_heads=2, moe=moe)
    with torch.device("meta"):
        model = GPT(config)
    if moe:
        model.blocks[0].mlp.experts.use_grouped(torch.device("cpu"))
    drop_memory(model)
    with FAKE, Meter() as meter, torch.no_grad():
        with meter.reading() as forward:
            model(torch.zeros(3, 32, dtype=torch.int64))
    assert 3 * forward.flops == config.flops_per_token() * 3 * 32


KEPT, GRADIENTS = 1000, 10
PROFILE = Profile(
    weights=100, versions=100, buffers=3, gradients=GRADIENTS, optimizer=200, correction=100,
    forward=Reading(KEPT, KEPT + 5), first_backward=Reading(GRADIENTS - KEPT, 20), backward=Reading(-KEPT, 30),
    update=Reading(-GRADIENTS, 40),
)  # fmt: skip
CONSTANT = 100 + 100 + 3 + 200 + 100


@pytest.mark.parametrize(("stage", "lookahead"), list(itertools.product(range(4), [0, 1, 3])))
def test_flights_are_those_of_the_schedule(stage: int, lookahead: int) -> None:
    schedule = Schedule(stage, 4, lookahead)
    memory = peak_of(schedule, PROFILE, 8, 0)
    flights = schedule.depth + 1
    assert (memory.in_flight, memory.parts["activations"], memory.during) == (flights, flights * KEPT, "backward")
    # One set is being summed while the other waits for its update.
    assert (memory.parts["gradients"], memory.parts["working"]) == (GRADIENTS * 2, 30)
    assert memory.total == CONSTANT + 2 * GRADIENTS + flights * KEPT + 30
    flushed = peak_of(Schedule(stage, 4, 0, StalenessRule(0)), PROFILE, 8, 7)
    assert (flushed.in_flight, flushed.parts["gradients"], flushed.parts["batch"]) == (4 - stage, GRADIENTS, 7)


@pytest.mark.parametrize(("slack", "sets"), [(0, 1), (1, 1), (2, 2), (9, 2), ("exact", 1)])
def test_the_least_staleness_needs_a_second_set_of_gradients_if_updates_wait(slack: Slack, sets: int) -> None:
    """The peak is at a backward; at a forward right after a gradient is complete, there is none of the next yet."""
    memory = peak_of(Schedule(1, 4, staleness="least", slack=slack), PROFILE, 8, 7)
    assert (memory.parts["gradients"], memory.parts["batch"]) == (sets * GRADIENTS, 14)
    assert (memory.in_flight, memory.parts["activations"]) == (3, 3 * KEPT)


def test_a_costly_update_is_the_peak_beside_the_microbatches_in_flight() -> None:
    costly = replace(PROFILE, update=Reading(-GRADIENTS, 5000))
    memory = peak_of(Schedule(1, 4, staleness="least"), costly, 8, 0)
    assert (memory.during, memory.in_flight, memory.parts["working"]) == ("update", 2, 5000)
    assert memory.parts["gradients"] == GRADIENTS


def plain(module: str, **strategy: Any) -> dict[str, Any]:
    arguments = {"class_path": "lightning_asyncpp.AsyncPipelineStrategy", "init_args": strategy}
    return {
        "trainer": {"devices": 2, "strategy": arguments if strategy else "async_pipeline", "max_steps": 3},
        "model": {"class_path": f"tests.tools.plan.plain.{module}"},
        "data": {"class_path": "tests.tools.plan.plain.Pairs"},
    }


def written(folder: Path, recipe: dict[str, Any]) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    ended: Any = 0
    try:
        main([*arguments, "--json"])
    except SystemExit as end:
        ended = end.code
    printed = capsys.readouterr()
    assert ended == code, printed.err
    plan: dict[str, Any] = json.loads(printed.out)
    return plan


@pytest.mark.parametrize(
    "name", ["quickstart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("quickstart_moe", "smollm_360m"))]
)
def test_a_recipe_is_planned(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = RECIPES / f"{name}.yaml"
    main([str(path), "--json", str(tmp_path / "plan.json")])  # it fits an H100, or this would raise
    table, plan = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    config = GPTConfig(**yaml.safe_load(path.read_text())["model"]["init_args"]["config"])
    assert sum(plan["partition"]["counts"]) == config.num_layers + 2
    with torch.device("meta"):
        assert plan["parameters"] == sum(parameter.numel() for parameter in GPT(config).parameters())
    assert plan["tokens_per_update"] == plan["samples_per_update"] * config.context_length
    for stage in plan["stages"]:
        sizes = stage["bytes"]
        assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
        assert sizes["weights"] == 4 * stage["parameters"]
        assert f"{sizes['total'] / (2**30 if 'memory in GiB' in table else 2**20):.2f}" in table
    # Backwards of attention recompute the scores; selective checkpointing recomputes all but matrix products.
    per_token = plan["flops_per_sample"] / config.context_length
    assert config.flops_per_token() < per_token < 1.1 * config.flops_per_token()
    least = plan["flops_per_sample"] * plan["samples_per_update"] / len(plan["stages"]) / (0.4 * 989e12)
    steps = {name: schedule["step"] for name, schedule in plan["schedules"].items()}
    assert least < steps["least staleness"] < steps["1F1B"]
    assert f"{steps['1F1B'] / steps['least staleness']:.2f}x" in table


def test_what_does_not_fit_ends_with_a_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, plain("Plain"))
    plan = planned(capsys, path, "--device", "cpu", "--memory", str(0.01 * 2**20 / 2**30), code=1)
    assert not plan["fits"]
    assert all(stage["bytes"]["total"] > plan["room"] for stage in plan["stages"])
    with pytest.raises(SystemExit, match="1"):
        main([path, "--memory", "2"])
    assert "The recipe does not fit. Remedies, the cheapest first: " in capsys.readouterr().out


def test_the_slow_link_is_where_nodes_meet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rank 0 is the last stage, so with four stages on two nodes, the first two stages are on the second node."""
    recipe = Case(2, TINY, SGD, 4, {"microbatches": 4}).recipe()
    recipe["trainer"]["num_nodes"] = 2
    plan = planned(capsys, written(tmp_path, recipe))
    sent, device = plan["stages"][0]["sent_bytes"], plan["device"]
    expected = [sent / (1e9 * device[kind]) for kind in ("link", "network", "link")]
    assert [stage["seconds"]["transfer"] for stage in plan["stages"]] == pytest.approx([*expected, 0])


def test_masters_beside_versions_in_bf16(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"microbatches": 2, "weight_dtype": "bf16", "staleness": "uniform"}
    path = written(tmp_path, Case(2, TINY, feedback(ADAMW), 8, options, precision="bf16-mixed").recipe())
    plan = planned(capsys, path)
    without = planned(capsys, path, "--trainer.strategy.init_args.weight_dtype=null")
    for narrow, wide in zip(plan["stages"], without["stages"]):
        sizes, before = narrow["bytes"], wide["bytes"]
        assert sizes["weights"] == sizes["versions"] == before["versions"] == sizes["correction"]
        assert sizes["activations"] < before["activations"]  # no converted weights are kept


def test_what_two_stages_share_counts_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = Case(2, {**TINY, "tie_embeddings": True}, SGD, 4, {"microbatches": 2}).recipe()
    soap = ["--optimizer=lightning_asyncpp.optim.SOAP", "--optimizer.precondition_frequency=1"]
    plan = planned(capsys, written(tmp_path, recipe), *soap)
    assert sum(stage["parameters"] for stage in plan["stages"]) == plan["parameters"] + 64 * 32


@pytest.mark.parametrize("module", ["Plain", "AsItIs"])
def test_ordinary_modules_with_data_that_must_be_loaded(
    module: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = planned(capsys, written(tmp_path, plain(module)))
    assert (plan["samples_per_update"], plan["tokens_per_update"]) == (16, None)
    assert plan["parameters"] == 8 * 64 + 64 + 64 * 64 + 64 + 64 + 1
    assert sum(stage["bytes"]["optimizer"] for stage in plan["stages"]) == 4 * plan["parameters"]  # one momentum
    assert plan["flops_per_sample"] == 6 * (8 * 64 + 64 * 64 + 64) - 2 * 8 * 64  # no gradient of x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.strategy", "sync_pipeline", "--devices", "7"], "4 layers with parameters, fewer than"),
        (["--trainer.strategy.init_args.microbatches", "1"], "microbatches=1 is smaller than the number of stages"),
        (["--trainer.strategy", "ddp"], "trainer.strategy='ddp' is not a pipeline"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path, Case(2, TINY, ADAMW, 4, {"microbatches": 2}).recipe())
    with pytest.raises(SystemExit, match="2"):
        asyncpp(["plan", path, *arguments])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert message in error
