"""The command: what it prints and writes, for recipes of all kinds, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_asyncpp.tools.plan.plan import main
from tests.tools.plan.cases import ADAMW, SGD, Case, feedback

QUICKSTART = str(Path(__file__).parents[3] / "recipes" / "quickstart.yaml")
TINY: dict[str, Any] = {"vocab_size": 64, "context_length": 16, "num_layers": 4, "dim": 32, "num_heads": 2}
SMALL = {**TINY, "num_layers": 2}


def written(folder: Path, recipe: dict[str, Any]) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    try:
        main([*arguments, "--json"])
        ended: Any = 0
    except SystemExit as end:
        ended = end.code
    printed = capsys.readouterr()
    assert ended == code, printed.err
    plan: dict[str, Any] = json.loads(printed.out)
    return plan


def test_the_quickstart_as_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([QUICKSTART, "--no-search", "--json", str(tmp_path / "plan.json"), "--trainer.strategy.init_args.lookahead=0"])
    text = capsys.readouterr().out
    assert "853 k parameters on 2 x h100: 2 stages, lookahead 0, no flush, gradients 0.25, 0 updates old;" in text
    assert "32 samples (4.1 k tokens) per update, 4 micro-batches of 8" in text
    assert "1F1B, with a flush" in text
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["parameters"] == 853120
    first, last = plan["stages"]
    assert first["parameters"] + last["parameters"] == 853120
    assert first["bytes"]["weights"] == first["bytes"]["versions"] == first["bytes"]["correction"]
    assert first["bytes"]["weights"] == 4 * first["parameters"]
    assert (first["bytes"]["in_flight"], last["bytes"]["in_flight"]) == (2, 1)
    assert plan["synchronous"]["step"] > plan["predicted"]["step"]
    assert plan["predicted"]["tokens_per_second"] == pytest.approx(32 * 128 / plan["predicted"]["step"])


def test_what_fits_does_and_more_does_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, plain("Deep", micro_batches=8, staleness="uniform"))
    room = ["--device", "cpu", "--memory", str(0.6 * 2**20 / 2**30), "--data.init_args.batch_size", "256"]
    limits = planned(capsys, path, *room)["limits"]
    assert (limits["lookahead"], limits["micro_batches"]) == (1, 4)
    samples = limits["samples"]

    def fits(argument: str) -> bool:
        with contextlib.suppress(SystemExit):
            main([path, *room, argument, "--no-search", "--json"])
        return bool(json.loads(capsys.readouterr().out)["fits"])

    assert fits("--trainer.strategy.init_args.micro_batches=4")
    assert not fits("--trainer.strategy.init_args.micro_batches=2")
    assert fits(f"--data.init_args.batch_size={8 * samples}")
    assert not fits(f"--data.init_args.batch_size={8 * (samples + 1)}")


def test_what_does_not_fit_is_mended_by_the_first_change_that_is_enough(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path, Case(2, SMALL, SGD, 64, {"micro_batches": 2, "lookahead": 0}).recipe())
    plan = planned(capsys, path, "--device", "cpu", "--memory", str(2 * 2**20 / 2**30), code=1)
    *insufficient, last = plan["mends"]
    assert not any(mend["fits"] for mend in insufficient)
    assert last["fits"]
    assert last["bytes"] <= 2 * 2**20 < plan["stages"][0]["bytes"]["total"]
    check_that_mends_are_what_they_say(capsys, [last], path, "--device", "cpu")


def check_that_mends_are_what_they_say(
    capsys: pytest.CaptureFixture[str], mends: Sequence[dict[str, Any]], *arguments: str
) -> None:
    """Each is what the arguments that it names come to."""
    assert mends
    for mend in mends:
        main([*arguments, "--no-search", "--json", *mend["change"].split()])
        again = json.loads(capsys.readouterr().out)
        assert max(stage["bytes"]["total"] for stage in again["stages"]) == mend["bytes"]
        assert again["predicted"]["step"] == mend["step"]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({}, marks=pytest.mark.slow),  # a name alone, which takes no arguments
        # None of it is for more stages.
        pytest.param({"micro_batches": 2, "lookahead": 1, "partition": [2, 6]}, marks=pytest.mark.slow),
        {"micro_batches": 4, "lookahead": 3, "data_parallel_size": 2, "placement": "pipeline_across_nodes"},
    ],
    ids=["short name", "partition", "replicas"],
)
def test_every_change_can_be_made_as_it_is_named(
    strategy: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = plain("Deep", **strategy)
    recipe["trainer"] |= {"devices": 1 + ("data_parallel_size" in strategy), "num_nodes": 2}
    arguments = [written(tmp_path, recipe), "--reserve", "0", "--network", "0.01"]
    mends = planned(capsys, *arguments, "--memory", str(0.12 * 2**20 / 2**30), code=1)["mends"]
    assert any("--devices" in mend["change"] for mend in mends)
    check_that_mends_are_what_they_say(capsys, mends, *arguments)


@pytest.mark.parametrize(
    ("slack", "stale"),
    [
        ("0", [0.25, 0]),
        pytest.param("1", [0.5, 0.25], marks=pytest.mark.slow),
        pytest.param("exact", [0.25, 0.25], marks=pytest.mark.slow),
    ],
)
def test_the_least_staleness_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, slack: str, stale: list[float]
) -> None:
    arguments = [QUICKSTART, "--no-search", "--trainer.strategy.init_args.staleness=least"]
    arguments += [f"--trainer.strategy.init_args.slack={slack}", "--trainer.strategy.init_args.lookahead=0"]
    main([*arguments, "--json", str(tmp_path / "plan.json")])
    text = capsys.readouterr().out
    assert f"gradients {stale[0]:.3g}, {stale[1]:.3g} updates old" in text
    assert "least staleness, lookahead 0" in text
    pipeline = json.loads((tmp_path / "plan.json").read_text())["pipeline"]
    assert (pipeline["staleness"], pipeline["gradient_staleness"]) == ("least", stale)


@pytest.mark.slow
def test_nothing_is_enough_for_too_little_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, Case(2, TINY, ADAMW, 4, {"micro_batches": 2}).recipe())
    with pytest.raises(SystemExit, match="1"):
        main([path, "--device", "cpu", "--memory", "1e-5"])
    text = capsys.readouterr().out
    assert "It does not fit" in text
    assert "None of them is enough" in text


def test_more_devices_than_the_recipe_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, plain("Deep", micro_batches=4))
    plan = planned(capsys, path, "--devices", "4", "--no-search", "--device", "a100")
    assert len(plan["stages"]) == 4
    assert plan["device"]["tflops"] == 312


def test_masters_beside_versions_in_bf16(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"micro_batches": 2, "weight_dtype": "bf16", "staleness": "uniform"}
    mixed = Case(2, SMALL, feedback(ADAMW), 8, options, precision="bf16-mixed")
    path = written(tmp_path, mixed.recipe())
    plan = planned(capsys, path, "--no-search")
    without = planned(capsys, path, "--no-search", "--trainer.strategy.init_args.weight_dtype=null")
    for narrow, wide in zip(plan["stages"], without["stages"]):
        sizes, before = narrow["bytes"], wide["bytes"]
        assert sizes["weights"] == sizes["versions"] == before["versions"] == sizes["correction"]
        assert sizes["gradients"] == before["gradients"]  # summed in fp32
        assert sizes["activations"] < before["activations"]  # no converted weights are kept


def test_what_two_stages_share_counts_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = Case(2, {**SMALL, "tie_embeddings": True}, SGD, 4, {"micro_batches": 2}).recipe()
    plan = planned(capsys, written(tmp_path, recipe), "--no-search")
    assert sum(stage["parameters"] for stage in plan["stages"]) == plan["parameters"] + 64 * 32


def test_an_ordinary_module_with_data_that_must_be_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, plain("Plain"))
    plan = planned(capsys, path, "--no-search")
    assert plan["samples_per_update"] == 16
    assert plan["tokens_per_update"] is None
    assert [stage["num_layers"] for stage in plan["stages"]] == plan["pipeline"]["partition"]
    assert sum(stage["bytes"]["optimizer"] for stage in plan["stages"]) == 4 * plan["parameters"]  # one momentum
    assert any("first training batch was loaded" in note for note in plan["notes"])
    assert math.isclose(plan["flops_per_sample"], 6 * (8 * 64 + 64 * 64 + 64) - 2 * 8 * 64)  # no gradient of x


def test_the_devices_of_a_node_are_those_of_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = plain("Deep")
    recipe["trainer"] |= {"devices": 2, "num_nodes": 2, "strategy": "sync_pipeline"}
    path = written(tmp_path, recipe)

    def per_node(*arguments: str) -> int:
        return int(planned(capsys, path, "--no-search", *arguments)["device"]["per_node"])

    assert per_node() == 2
    assert per_node("--devices", "1") == 2
    assert per_node("--devices", "8") == 2
    assert per_node("--trainer.devices", "auto", "--devices", "8") == 4
    assert per_node("--trainer.num_nodes", "1") == 8
    assert per_node("--trainer.num_nodes", "1", "--trainer.devices", "8", "--device", "cpu") == 8
    assert per_node("--devices-per-node", "3") == 3


@pytest.mark.parametrize("slack", [0, 1])
def test_updates_that_wait_for_replicas_are_named(
    slack: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = plain("Deep")
    options = {"data_parallel_size": 2, "slack": slack, "micro_batches": 2}
    recipe["trainer"] |= {
        "devices": 4, "strategy": {"class_path": "lightning_asyncpp.AsyncPipelineStrategy", "init_args": options}
    }  # fmt: skip
    notes = planned(capsys, written(tmp_path, recipe), "--no-search")["notes"]
    assert any("slack=1 hides it" in note for note in notes) == (slack == 0)


def test_the_reserve_is_of_the_memory_that_is_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = planned(capsys, written(tmp_path, plain("Deep")), "--no-search", "--memory", "24")
    assert plan["device"]["reserve_gib"] == pytest.approx(2 + 0.05 * 24)


@pytest.mark.parametrize(("module", "is_measured"), [("Measured", True), ("Known", False), ("Plain", False)])
def test_a_cut_that_a_training_would_measure_is_said_to_be_another_one(
    module: str, is_measured: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path, plain(module))
    main([path, "--no-search", "--json", str(tmp_path / "plan.json")])
    text = capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    chosen = "by pipeline_costs()" if module == "Known" else "by numbers of parameters"
    assert plan["pipeline"]["partition_chosen"] == chosen
    assert chosen in " ".join(text.split())
    assert any("measures with example_input_array" in note for note in plan["notes"]) == is_measured
    assert ("Note: a training cuts this model by times that it measures" in text) == is_measured
    if is_measured:  # once the cut is given, nothing is measured
        strategy = ["--trainer.strategy", "lightning_asyncpp.AsyncPipelineStrategy"]
        given = planned(capsys, path, "--no-search", *strategy, "--trainer.strategy.init_args.partition", "[1, 3]")
        assert given["pipeline"]["partition_chosen"] == "as given"
        assert not any("example_input_array" in note for note in given["notes"])


@pytest.mark.parametrize("module", ["Deep", "Alone"])
def test_a_training_step_takes_what_lightning_gives_it(
    module: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert planned(capsys, written(tmp_path, plain(module)), "--no-search")["fits"]


def test_a_module_that_looks_at_values_while_it_is_built_has_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, same = (planned(capsys, written(tmp_path, plain(m)), "--no-search") for m in ("Schedule", "Plain"))
    assert plan["stages"] == same["stages"]
    assert any("could not be built on the meta device" in note for note in plan["notes"])


def test_a_model_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is as large as one that says where it can be cut."""
    plan, same = (planned(capsys, written(tmp_path, plain(m)), "--no-search") for m in ("AsItIs", "Plain"))
    sizes = [sum(stage["parameters"] for stage in each["stages"]) for each in (plan, same)]
    assert sizes == [8 * 64 + 64 + 64 * 64 + 64 + 64 + 1] * 2
    assert plan["stages"][0]["layers"] != plan["stages"][1]["layers"]
    assert any("run to find its layers" in note for note in plan["notes"])


def test_a_step_that_looks_at_values_is_replaced_and_said_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = planned(capsys, written(tmp_path, plain("Looking")), "--no-search")
    assert any("looks at values" in note for note in plan["notes"])


def plain(module: str, **strategy: Any) -> dict[str, Any]:
    arguments = {"class_path": "lightning_asyncpp.AsyncPipelineStrategy", "init_args": strategy}
    return {
        "trainer": {"devices": 2, "strategy": arguments if strategy else "async_pipeline", "max_steps": 3},
        "model": {"class_path": f"tests.tools.plan.plain.{module}"},
        "data": {"class_path": "tests.tools.plan.plain.Pairs"},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu", "--mfu", "2"], "--device tpu is none of h100, .*; --mfu 2 must be"),
        (
            ["--trainer.strategy", "sync_pipeline", "--devices", "7"],
            "6 layers with parameters, fewer than",
        ),
        (["--devices", "7"], "micro_batches=2 is smaller than the number of stages"),
        (["--trainer.strategy.init_args.micro_batches", "1"], "micro_batches=1 is smaller than the number of stages"),
        (["--trainer.strategy.init_args.nonsense", "1"], "nonsense"),
        (["--trainer.strategy", "ddp"], "trainer.strategy='ddp' is no pipeline"),
        (["--trainer.strategy", "auto"], "is no pipeline: give --trainer.strategy async_pipeline"),
        (["--model.init_args.config.num_heads", "5"], "must divide dim"),
        (["--trainer.precision", "16-mixed"], "fp16 needs a loss scale"),
        (["--trainer.devices", "auto"], "give the number with --devices"),
        (["--trainer.strategy.init_args.weight_dtype", "bf16"], "needs precision='bf16-mixed'"),
        (["--trainer.val_check_interval", "00:00:10:00"], "val_check_interval is a time"),
        (["--trainer.val_check_interval", "0.5", "--trainer.check_val_every_n_epoch", "null"], "should be an integer"),
        (
            [
                "--trainer.sync_batchnorm",
                "true",
                "--trainer.callbacks",
                "lightning.pytorch.callbacks.ModelPruning",
                "--trainer.callbacks.pruning_fn",
                "l1_unstructured",
            ],
            "sync_batchnorm=True[^$]*ModelPruning cannot work under a pipeline",
        ),
        (["--memory", "inf", "--tflops", "nan", "--reserve", "nan"], "memory inf must.*tflops nan must.*reserve nan"),
        (["--reserve", "80"], "80 GiB leaves nothing of 79.1"),
        (["--memory", "24", "--reserve", "24"], "24 GiB leaves nothing of 24"),
        (["--json", "nowhere/plan.json"], "--json nowhere/plan.json is no file in a folder that exists"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path, Case(2, TINY, ADAMW, 4, {"micro_batches": 2}).recipe())
    with pytest.raises(SystemExit, match="2"):
        main([path, *arguments])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error), error


def test_optimizers_and_recipes_that_cannot_be_used_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([written(tmp_path, plain("Foreign"))])
    assert "over parameters that are not this stage's" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([written(tmp_path, plain("TwoOptimizers"))])
    assert "use one optimizer with parameter groups" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere.yaml")])
    assert "there is no recipe" in capsys.readouterr().err
