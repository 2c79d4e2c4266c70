"""Time to a loss: the arithmetic, what is refused, and (slow) a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import Namespace

from lightning_asyncpp.tools.bench.bench import main
from lightning_asyncpp.tools.bench.loss_curves import Reached, common_targets, compare, reach
from lightning_asyncpp.tools.bench.names import ASYNC, ASYNC_2BW, ASYNC_SLACK_1, SYNC
from lightning_asyncpp.tools.bench.time_to_loss import recipe_of

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
CURVE = [(10, 1.0, 4.0), (20, 2.0, 3.0), (30, 3.0, 3.2), (40, 4.0, 2.0)]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (4.5, Reached(10, 1.0)),
        (4.0, Reached(10, 1.0)),
        (3.5, Reached(15.0, 1.5)),
        (3.1, Reached(19.0, 1.9)),
        (3.0, Reached(20.0, 2.0)),
        (2.6, Reached(35.0, 3.5)),
        (1.9, None),
    ],
)
def test_a_target_is_reached_when_the_loss_first_falls_to_it(target: float, expected: Reached | None) -> None:
    found = reach(CURVE, target)
    if expected is None or found is None:
        assert found is expected
    else:
        assert (found.steps, found.seconds) == pytest.approx((expected.steps, expected.seconds))


def test_targets_are_losses_that_every_run_reached() -> None:
    worse = [(step, seconds, loss + 0.123) for step, seconds, loss in CURVE]
    targets = common_targets([CURVE, worse], 3)
    assert targets == [3.13, 2.63, 2.13]
    assert all(reach(curve, target) for curve in (CURVE, worse) for target in targets)


def test_ratios_are_taken_within_a_seed_and_only_where_all_runs_got_there() -> None:
    faster = [(step, seconds / 2, loss) for step, seconds, loss in CURVE]
    stuck = [(step, seconds / 4, max(loss, 3.0)) for step, seconds, loss in CURVE]
    lines = compare({SYNC: [CURVE, CURVE], ASYNC: [faster, stuck]}, [3.5, 2.5])
    ratio = lines[0].speed_up[ASYNC]
    assert ratio is not None
    assert (ratio.min, ratio.max) == pytest.approx((2.0, 4.0))
    assert lines[1].speed_up == {ASYNC: None}
    assert lines[1].seconds[ASYNC] is None
    assert lines[1].seconds[SYNC] is not None


def arguments(**changes: Any) -> Namespace:
    defaults = {
        "stages": 2, "micro_batches": 2, "lookahead": None, "steps": 4, "validate_every": 2, "val_batches": 1,
        "sync_lr": None, "async_lr": None, "staleness": "uniform", "slack": 0,
    }  # fmt: skip
    return Namespace(**{**defaults, **changes})


def test_both_recipes_differ_in_the_strategy_and_the_learning_rate_alone() -> None:
    recipe = yaml.safe_load(QUICKSTART.read_text())
    before = json.dumps(recipe)
    sync = recipe_of(recipe, SYNC, 7, arguments(sync_lr=0.02))
    own = recipe_of(recipe, ASYNC, 7, arguments(sync_lr=0.02, staleness="least"))
    assert json.dumps(recipe) == before
    assert sync["trainer"].pop("strategy")["class_path"].endswith("SyncPipelineStrategy")
    assert own["trainer"].pop("strategy") == {
        "class_path": "lightning_asyncpp.AsyncPipelineStrategy",
        "init_args": {
            "micro_batches": 2,
            "lookahead": None,
            "staleness": "least",
            "slack": 0,
        },
    }
    rates = [r["model"]["init_args"]["optimizer"]["init_args"]["base"]["init_args"].pop("lr") for r in (sync, own)]
    assert rates == [0.02, 0.01]
    assert sync == own
    assert sync["seed_everything"] == 7


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (ASYNC_2BW, {"staleness": "uniform"}),
        (ASYNC_SLACK_1, {"slack": 1}),
    ],
)
def test_further_pipelines_have_settings_of_their_own(system: str, expected: dict[str, Any]) -> None:
    chosen = arguments(steps=100, staleness="least", slack=2)
    strategy = recipe_of(yaml.safe_load(QUICKSTART.read_text()), system, 7, chosen)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_asyncpp.AsyncPipelineStrategy"
    assert strategy["init_args"] == {"micro_batches": 2, "lookahead": None, **expected}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--micro-batches", "1"], "use micro_batches >= 2"),
        (["--seeds", "1", "1"], "each counts once"),
        (["--steps", "30"], "at least two validations"),
        (["--also", "1f1b"], "--also 1f1b: unknown; there are async+2bw"),
        (["--also", "async+2bw", "async+2bw"], "named more than once"),
        (["--config", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
    ],
)
def test_wrong_arguments_are_refused(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["time-to-loss", "--config", str(QUICKSTART), *wrong])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_comparison_runs_to_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(QUICKSTART.read_text())
    recipe["model"]["init_args"]["config"].update(num_layers=2, dim=32, num_heads=2, num_kv_heads=2, context_length=16)
    recipe["data"]["init_args"].update(context_length=16, batch_size=4, max_bytes=200_000, cache_dir=str(tmp_path))
    recipe["model"]["init_args"]["warmup_steps"] = 1
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    files = ["--config", str(tmp_path / "tiny.yaml"), "--json", str(tmp_path / "out.json")]
    sizes = ["--steps", "8", "--validate-every", "2", "--val-batches", "1", "--seeds", "3", "5", "--timeout", "200"]
    main(["time-to-loss", *files, *sizes, "--also", ASYNC_2BW])
    results = json.loads((tmp_path / "out.json").read_text())
    for system in (SYNC, ASYNC, ASYNC_2BW):
        assert [[point[0] for point in curve] for curve in results["curves"][system]] == [[2, 4, 6, 8]] * 2
        for curve in results["curves"][system]:
            seconds = [point[1] for point in curve]
            assert seconds == sorted(seconds)
            assert seconds[0] > 0
    printed = capsys.readouterr().out
    assert "sync / it" in printed
    assert "ms per update" in printed
