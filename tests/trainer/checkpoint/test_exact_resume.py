"""A run that goes on from a checkpoint is the uninterrupted one: batches, weights, losses, and metrics of epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.pool import Pools
from tests.helpers.resumable import (
    EPOCHS,
    TWO_EPOCHS,
    Showing,
    check_resumed,
    fit_showing,
    of_steps,
    run_of,
)
from tests.helpers.trainer import Run

STEPS = {"max_steps": 12, "max_epochs": -1}


@pytest.mark.parametrize(
    ("kind", "trainer", "stages"),
    [
        pytest.param("litdata", EPOCHS, 2, marks=pytest.mark.slow),  # with an emulated delay by default
        pytest.param("stateful noisy", STEPS, 3, marks=pytest.mark.slow),
        ("stateful noisy own sampler", STEPS, 3),
        pytest.param("plain", EPOCHS, 3, marks=pytest.mark.slow),
        pytest.param("plain own sampler", EPOCHS, 2, marks=pytest.mark.slow),
        pytest.param("plain generator", EPOCHS, 2, marks=pytest.mark.slow),
    ],
)
def test_after_any_batch(pools: Pools, kind: str, trainer: dict[str, Any], stages: int, tmp_path: Path) -> None:
    """In mid-epoch and at an epoch's last batch, whose epoch's end is still to come; a plain loader at the latter."""
    check_resumed(pools, run_of(tmp_path, kind, trainer), kind, tmp_path, [10] if "plain" in kind else [3, 10], stages)


class CountsBatches(Showing):
    """Asks for the number of steps, for which Lightning makes the loaders before it reads a checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def fit_counting(run: Run, kind: str, folder: str) -> dict[str, Any]:
    return fit_showing(run, kind, folder, make=CountsBatches)


@pytest.mark.parametrize("kind", ["stateful", pytest.param("litdata", marks=pytest.mark.slow)])
def test_with_loaders_that_were_made_before_the_checkpoint_was_read(pools: Pools, kind: str, tmp_path: Path) -> None:
    check_resumed(pools, run_of(tmp_path, kind, EPOCHS), kind, tmp_path, [3, 10], fit=fit_counting)


@pytest.mark.parametrize(
    "trainer", [{"max_steps": 10, "max_epochs": -1}, pytest.param({"max_epochs": 2}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("strategy", "processes", "at_epoch_end"),
    [
        ("default", 2, False),
        ("delayed", 1, True),
        pytest.param("default", 2, True, marks=pytest.mark.slow),
        pytest.param("delayed", 1, False, marks=pytest.mark.slow),
    ],
)
def test_after_an_epochs_end(
    pools: Pools, strategy: str, processes: int, at_epoch_end: bool, trainer: dict[str, Any], tmp_path: Path
) -> None:
    """Or after its validation: metrics were logged, and do not count for the next epoch."""
    run = run_of(tmp_path, "plain", trainer, val_samples=(9,), strategy=strategy)
    saving = {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}", "save_on_train_epoch_end": at_epoch_end}
    whole = pools.run(processes, fit_showing, replace(run, callbacks=((ModelCheckpoint, saving),)), "plain", "")[0]
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=5.ckpt"))
    resumed = pools.run(processes, fit_showing, again, "plain", "")[0]
    assert of_steps(resumed) == {at: loss for at, loss in of_steps(whole).items() if at >= 5}
    assert resumed["epoch"] == whole["epoch"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trainer"), [("litdata", EPOCHS), ("plain", STEPS)], ids=["litdata", "plain"])
def test_a_middle_stage_ends_the_epoch_with_the_others(
    pools: Pools, kind: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    """It reads placeholders, of which there always are some, and which have a state if what is read elsewhere has."""
    check_resumed(pools, run_of(tmp_path, kind, trainer), kind, tmp_path, [10], stages=3)


@pytest.mark.parametrize("kind", ["litdata", pytest.param("stateful noisy", marks=pytest.mark.slow)])
def test_an_emulated_delay_after_any_batch(pools: Pools, kind: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind, EPOCHS, strategy="delayed", options={"microbatches": 2})
    check_resumed(pools, run, kind, tmp_path, [3, 10], stages=1)


@pytest.mark.parametrize(
    ("trainer", "at_the_end"),
    [
        (EPOCHS, True),
        pytest.param(STEPS, False, marks=pytest.mark.slow),
        pytest.param(EPOCHS, False, marks=pytest.mark.slow),
        pytest.param(STEPS, True, marks=pytest.mark.slow),
    ],
    ids=["epochs, at their ends", "steps, at validations", "epochs, at validations", "steps, at ends of epochs"],
)
def test_saved_while_an_epoch_ends(pools: Pools, trainer: dict[str, Any], at_the_end: bool, tmp_path: Path) -> None:
    """By its end, or by its validation."""
    saving = {"save_top_k": -1, "filename": "{step}", "every_n_epochs": 1, "save_on_train_epoch_end": at_the_end}
    run = run_of(tmp_path, "plain", trainer, val_samples=(9,), scheduler="decay-epoch")
    run = replace(run, callbacks=((ModelCheckpoint, {"dirpath": tmp_path} | saving),))
    check_resumed(pools, run, "plain", tmp_path, [5, 10])


class Saves(L.Callback):
    """Saves by itself, where the pipeline does not expect it."""

    def __init__(self, dirpath: Path) -> None:
        self.dirpath = dirpath

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.dirpath / f"step={trainer.global_step}.ckpt")


@pytest.mark.parametrize("strategy", ["default", pytest.param("sync", marks=pytest.mark.slow)])
def test_saved_by_a_callback_of_ones_own(strategy: str, pools: Pools, tmp_path: Path) -> None:
    """What the save finishes counts for the epoch's metrics, and was logged: a run that goes on does not see it."""
    run = run_of(tmp_path, "stateful", TWO_EPOCHS, strategy=strategy)
    run = replace(run, callbacks=((Saves, {"dirpath": tmp_path}),))
    check_resumed(pools, run, "stateful", tmp_path, [4, 8], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer", [EPOCHS, STEPS, EPOCHS | {"limit_train_batches": 4}], ids=["epochs", "steps", "limit"]
)
@pytest.mark.parametrize(
    "kind",
    [
        "litdata",
        "litdata workers",
        "stateful",
        "stateful workers",
        "stateful own sampler",
        "stateful noisy own sampler",
        "stateful workers own sampler",
    ],
)
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_after_every_batch(
    pools: Pools, kind: str, trainer: dict[str, Any], stages: int, replicas: int, tmp_path: Path
) -> None:
    run = run_of(tmp_path, kind, trainer, options={"data_parallel_size": replicas})
    if replicas > 1 and "own" in kind:
        pytest.skip("the same data for both replicas")
    check_resumed(pools, run, kind, tmp_path, list(range(1, 12 if replicas == 1 else 6)), stages)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    "validating", [{"val_check_interval": 2}, {"check_val_every_n_epoch": None, "val_check_interval": 4}, {}]
)
def test_around_every_validation(
    pools: Pools, trainer: dict[str, Any], validating: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of(tmp_path, "litdata", trainer | validating, val_samples=(9,), scheduler="decay-epoch")
    check_resumed(pools, run, "litdata", tmp_path, list(range(1, 12)))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_with_a_state_is_shuffled_as_one_without(replicas: int, pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, "plain", TWO_EPOCHS, options={"data_parallel_size": replicas})
    run = replace(run, callbacks=())
    stateful, plain = (pools.run(2 * replicas, fit_showing, run, kind, "") for kind in ("stateful", "plain"))
    assert [rank["numbers"] for rank in stateful] == [rank["numbers"] for rank in plain]
    numbers = [number for rank in stateful for batch in rank["numbers"] for number in batch]
    assert set(numbers) == set(range(run.samples))
