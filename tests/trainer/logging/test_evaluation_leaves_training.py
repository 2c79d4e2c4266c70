"""A training with evaluations has bitwise the weights, buffers, losses and data of one without them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.evaluations import Evaluations, trajectory
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS, OneProcess, saving
from tests.helpers.trainer import Run

SAMPLES = 36  # three batches
RUN = Run(Run, "default", {"microbatches": 4}, samples=SAMPLES, batch_size=12, shuffle=True, trainer={"max_epochs": 2})  # type: ignore[arg-type]
CASES = {
    "a share of the batches": Evaluations({"limit_val_batches": 0.5, "num_sanity_val_steps": 2}, ((24, 4), (9, 2))),
    "over epochs": Evaluations({"val_check_interval": 2, "check_val_every_n_epoch": None}),
    "while an update is outstanding": Evaluations({"val_check_interval": 1, "accumulate_grad_batches": 2}),
    "torch's own shuffling": Evaluations({"val_check_interval": 2}, shuffled=True),
    "with gradients": Evaluations({"val_check_interval": 2, "inference_mode": False}, gradients=True),
}


def check(pools: Pools | OneProcess, evaluations: Evaluations, stages: int, replicas: int = 1) -> None:
    keep = {name: value for name, value in evaluations.trainer.items() if name == "accumulate_grad_batches"}
    options = RUN.options | ({"data_parallel_size": replicas} if replicas > 1 else {})
    run = replace(RUN, options=options, trainer=RUN.trainer | keep, samples=SAMPLES * replicas)
    without, with_them = (
        pools.run(stages * replicas, trajectory, run, given, evaluations) for given in (None, evaluations)
    )
    for expected, found in zip(without, with_them):
        for kind in ("weights", "buffers"):
            assert_equal_weights(found[kind], expected[kind])
        for name in ("losses", "epochs", "counted", "left_over"):
            assert found[name] == expected[name], name
        assert sorted(found["batches"]) == sorted(expected["batches"])  # the order of stages in one process may differ
        assert found["callback_metrics"] == with_them[0]["callback_metrics"]
    if evaluations.trainer.get("limit_val_batches") != 0 and evaluations.trainer.get("check_val_every_n_epoch") != 2:
        assert with_them[0]["validations"]
    assert len(without[0]["losses"]) == len(without[0]["counted"]) >= 2


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_without_evaluation(name: str) -> None:
    check(ONE_PROCESS, CASES[name], 3)


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [pytest.param("torch's own shuffling", 3, 1, marks=pytest.mark.slow), ("while an update is outstanding", 2, 2)],
)
def test_over_processes(pools: Pools, name: str, stages: int, replicas: int) -> None:
    check(pools, CASES[name], stages, replicas)


def test_a_checkpoint_of_a_validation_holds_the_generators_of_the_training(tmp_path: Path) -> None:
    """A checkpoint saved while the validation's generators are in use restores these and those of the training."""
    evaluations = Evaluations(shuffled=True)
    run = replace(RUN, callbacks=(saving(tmp_path, monitor="val_loss"),))
    run = replace(run, trainer={"max_epochs": 3, "enable_checkpointing": True})
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=3.ckpt"))
    (whole,), (resumed,) = (ONE_PROCESS.run(2, trajectory, of, evaluations, evaluations) for of in (run, again))
    for kind in ("weights", "buffers"):
        assert_equal_weights(resumed[kind], whole[kind])
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["left_over"] == whole["left_over"]
    assert [m["val_loss"] for m in resumed["validations"]] == [m["val_loss"] for m in whole["validations"][1:]]


def draw_case(seed: int) -> tuple[Evaluations, int, int]:
    """Return random evaluations and numbers of stages and replicas, which are determined by the seed."""
    rng = random.Random(seed)
    trainer: dict[str, Any] = {
        "val_check_interval": rng.choice([1, 2, 3, 0.5, 1.0]),
        "limit_val_batches": rng.choice([0, 1, 2, 5, 0.5, 1.0]),
        "num_sanity_val_steps": rng.choice([0, 2, -1]),
        "check_val_every_n_epoch": rng.choice([1, 1, 2]),
        "accumulate_grad_batches": rng.choice([1, 1, 2, 3]),
    }
    if isinstance(trainer["val_check_interval"], int) and rng.random() < 0.5:
        trainer["check_val_every_n_epoch"] = None
    sizes = tuple((rng.randint(14, 24), rng.randint(2, 6)) for _ in range(rng.choice([1, 1, 2, 3])))
    evaluations = Evaluations(
        trainer, sizes, shuffled=rng.random() < 0.5, drawing=rng.random() < 0.7, workers=rng.choice([0, 0, 0, 1])
    )
    return evaluations, *rng.choice([(1, 1), (2, 1), (3, 1), (2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_evaluations(pools: Pools, seed: int) -> None:
    check(pools, *draw_case(seed))
