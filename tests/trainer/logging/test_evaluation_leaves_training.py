"""Evaluation in between changes nothing of a training: weights, buffers, losses and data are those without, bitwise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.evaluations import Evaluations, trajectory
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run

RUN = Run(Run, samples=48, batch_size=12, shuffle=True, trainer={"max_epochs": 2})  # type: ignore[arg-type]

CASES = {
    "every batch": Evaluations({"val_check_interval": 1}),
    "half an epoch": Evaluations({"val_check_interval": 0.5, "limit_val_batches": 2}, ((13, 4), (5, 3))),
    "a share of the batches": Evaluations({"limit_val_batches": 0.5, "num_sanity_val_steps": 2}, ((24, 4), (9, 2))),
    "no batches": Evaluations({"limit_val_batches": 0}),
    "a sanity check of everything": Evaluations({"num_sanity_val_steps": -1, "check_val_every_n_epoch": 2}),
    "over epochs": Evaluations({"val_check_interval": 3, "check_val_every_n_epoch": None}),
    "while gradients add up": Evaluations({"val_check_interval": 1, "accumulate_grad_batches": 3}),
    "while an update is outstanding": Evaluations({"val_check_interval": 3, "accumulate_grad_batches": 2}),
    "torch's own shuffling": Evaluations({"val_check_interval": 2}, shuffled=True),
    "with gradients": Evaluations({"val_check_interval": 2, "inference_mode": False}, gradients=True),
}
# Beside gradients that add up, and beside shares of the batches, too.
REPEATS = ("every batch", "half an epoch", "no batches")
WORLDS = [(1, 1), (2, 1), (3, 1), (2, 2)]


def check(pools: Pools, evaluations: Evaluations, stages: int, replicas: int, strategy: str = "default") -> None:
    options = {"microbatches": 4, "data_parallel_size": replicas}
    keep = {name: value for name, value in evaluations.trainer.items() if name == "accumulate_grad_batches"}
    run = replace(RUN, strategy=strategy, options=options, trainer=RUN.trainer | keep, samples=48 * replicas)
    without = pools.run(stages * replicas, trajectory, run, None, evaluations)
    with_them = pools.run(stages * replicas, trajectory, run, evaluations, evaluations)
    for rank, (expected, found) in enumerate(zip(without, with_them)):
        equal(found, expected, f"rank {rank}")
        assert found["callback_metrics"] == with_them[0]["callback_metrics"]
    if evaluations.trainer.get("limit_val_batches") != 0 and evaluations.trainer.get("check_val_every_n_epoch") != 2:
        assert with_them[0]["validations"]
    assert len(without[0]["losses"]) == len(without[0]["counted"]) >= 4


def equal(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for kind in ("weights", "buffers"):
        assert found[kind].keys() == expected[kind].keys()
        for name, array in expected[kind].items():
            np.testing.assert_array_equal(found[kind][name], array, err_msg=f"{where}: {name}")
    for name in ("losses", "epochs", "counted", "batches", "left_over"):
        assert found[name] == expected[name], f"{where}: {name}"


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        pytest.param(name, *WORLDS[index % len(WORLDS)], marks=[pytest.mark.slow] if name in REPEATS else [])
        for index, name in enumerate(CASES)
    ],
)
def test_training_is_that_without_evaluation(pools: Pools, name: str, stages: int, replicas: int) -> None:
    check(pools, CASES[name], stages, replicas)


def test_an_emulated_pipeline_draws_as_the_pipeline_does(pools: Pools) -> None:
    evaluations = Evaluations({"val_check_interval": 3}, shuffled=True)
    run = replace(RUN, options={"microbatches": 4})
    pipeline = pools.run(2, trajectory, run, evaluations, evaluations)
    (emulated,) = pools.run(1, trajectory, replace(run, strategy="delayed"), evaluations, evaluations)
    (without,) = pools.run(1, trajectory, replace(run, strategy="delayed"), None, evaluations)
    equal(emulated, without, "emulated")
    assert emulated["losses"] == pipeline[0]["losses"]
    assert emulated["batches"] == pipeline[0]["batches"]


def test_a_checkpoint_of_a_validation_holds_the_generators_of_the_training(pools: Pools, tmp_path: Path) -> None:
    """It is saved where the validation's generators are in place; those are taken up, too, by the next validation."""
    evaluations = Evaluations(shuffled=True)
    saving = (ModelCheckpoint, {"dirpath": tmp_path, "monitor": "val_loss", "save_top_k": -1, "filename": "{step}"})
    run = replace(RUN, options={"microbatches": 4}, callbacks=(saving,))
    run = replace(run, trainer={"max_epochs": 3, "enable_checkpointing": True})
    whole = pools.run(2, trajectory, run, evaluations, evaluations)
    path = str(tmp_path / "step=4.ckpt")
    resumed = pools.run(2, trajectory, replace(run, callbacks=(), ckpt_path=path), evaluations, evaluations)
    for found, expected in zip(resumed, whole):
        for kind in ("weights", "buffers"):
            assert_equal_weights(found[kind], expected[kind])
        assert found["losses"] == expected["losses"][len(expected["losses"]) // 3 :]
        assert found["batches"] == expected["batches"][len(expected["batches"]) // 3 :]
        assert found["left_over"] == expected["left_over"]
    assert [m["val_loss"] for m in resumed[0]["validations"]] == [m["val_loss"] for m in whole[0]["validations"][1:]]


def draw_case(seed: int) -> tuple[Evaluations, int, int, str]:
    """Evaluations of a training, its stages and replicas, and its strategy; the same ones for the same seed."""
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
    gradients = rng.random() < 0.2
    evaluations = Evaluations(
        trainer | {"inference_mode": not gradients},
        tuple((rng.randint(14, 24), rng.randint(2, 6)) for _ in range(rng.choice([1, 1, 2, 3]))),
        shuffled=rng.random() < 0.5, drawing=rng.random() < 0.7, workers=rng.choice([0, 0, 0, 1]), gradients=gradients,
    )  # fmt: skip
    return (
        evaluations,
        *rng.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]),
        rng.choice(["default", "default", "sync"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_evaluations(pools: Pools, seed: int) -> None:
    check(pools, *draw_case(seed))
