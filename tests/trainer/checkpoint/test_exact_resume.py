"""A resumed run has the batches, weights, losses and epoch metrics of the uninterrupted run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.pool import Pools
from tests.helpers.resumable import (
    EPOCHS,
    ONE_PROCESS,
    TWO_EPOCHS,
    Showing,
    check_resumed,
    fit_showing,
    run_of,
    saving,
    saving_after,
)
from tests.helpers.trainer import Run

STEPS = {"max_steps": 12, "max_epochs": -1}


class CountsBatches(Showing):
    """Model that asks for the number of steps, so Lightning makes the loaders before it reads a checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Paired(Showing):
    """Model that is fed by two loaders, of which the second ends first, and records the samples of both."""

    def training_step(self, batch: list[dict[str, Tensor] | None], batch_idx: int) -> Tensor:
        first, second = batch
        assert first is not None
        loss = F.mse_loss(self.model(first["x"]), first["y"])  # on earlier stages the step ends here
        self.numbers.append([first["number"].tolist(), None if second is None else second["number"].tolist()])
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(first["x"]))
        return loss


LOADERS: dict[str, tuple[str, dict[str, Any], list[int], Any, int]] = {
    "of litdata, made before the checkpoint is read": ("litdata", TWO_EPOCHS, [3], CountsBatches, 37),
    "whose workers draw in the next epoch": ("stateful noisy workers", TWO_EPOCHS, [5], Showing, 37),
    "of several streams": ("litdata combined", TWO_EPOCHS, [6], Showing, 30),
    "two, of which the shorter has ended": ("two stateful", TWO_EPOCHS, [3], Paired, 32),
    "made anew": ("stateful", TWO_EPOCHS | {"reload_dataloaders_every_n_epochs": 1}, [5, 7], Showing, 37),
    "plain, at an epoch's last batch": ("plain", TWO_EPOCHS, [5], Showing, 37),
    "plain, with its own generator": ("plain own generator", TWO_EPOCHS, [5], Showing, 37),
    "with a state, and its own generator": ("stateful own generator", TWO_EPOCHS, [3, 5], Showing, 37),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_loaders(loader: str, tmp_path: Path) -> None:
    kind, trainer, steps, make, samples = LOADERS[loader]
    run = run_of(tmp_path, kind, trainer, samples=samples)
    (whole,) = check_resumed(ONE_PROCESS, run, kind, tmp_path, steps, fit=partial(fit_showing, make=make))
    if "two" not in kind:
        assert {number for batch in whole["numbers"] for number in batch} == set(range(samples))


class Saves(L.Callback):
    """Callback that saves a checkpoint where the pipeline does not expect it."""

    def __init__(self, dirpath: Path) -> None:
        self.dirpath = dirpath

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.dirpath / f"step={trainer.global_step}.ckpt")


def test_saved_by_a_callback_of_ones_own(tmp_path: Path) -> None:
    """Batches that the save completes count for the epoch's metrics; they are not logged again after resuming."""
    run = replace(run_of(tmp_path, "stateful", TWO_EPOCHS), callbacks=((Saves, {"dirpath": tmp_path}),))
    check_resumed(ONE_PROCESS, run, "stateful", tmp_path, [4])


@pytest.mark.parametrize(("trainer", "at_the_end"), [(TWO_EPOCHS, True), (STEPS, False)], ids=["epoch", "validation"])
def test_saved_while_an_epoch_ends(trainer: dict[str, Any], at_the_end: bool, tmp_path: Path) -> None:
    """Metrics that were logged before a save at an epoch's end or validation do not count for the next epoch."""
    run = run_of(tmp_path, "plain", trainer, val_samples=(9,), scheduler="decay-epoch")
    run = replace(run, callbacks=(saving(tmp_path, every_n_epochs=1, save_on_train_epoch_end=at_the_end),))
    check_resumed(ONE_PROCESS, run, "plain", tmp_path, [5])


def test_a_loader_with_a_state_is_shuffled_as_one_without(tmp_path: Path) -> None:
    run = replace(run_of(tmp_path, "plain", TWO_EPOCHS), callbacks=())
    stateful, plain = (ONE_PROCESS.run(2, fit_showing, run, kind, "")[0] for kind in ("stateful", "plain"))
    assert stateful["numbers"] == plain["numbers"]


@pytest.mark.parametrize("kind", ["plain own generator", "stateful own generator"])
def test_a_generator_of_its_own_shuffles_as_in_a_plain_trainer(kind: str, tmp_path: Path) -> None:
    """A sampler draws the order of an epoch that nobody asks for once it is stepped past its end."""
    run = replace(run_of(tmp_path, kind, EPOCHS, val_samples=(9,)), callbacks=())
    (ours,), theirs = ONE_PROCESS.run(2, fit_showing, run, kind, ""), fit_showing(as_plain(run), kind, "")
    assert flat(ours["numbers"]) == flat(theirs["numbers"])


def test_a_plain_trainer_reads_on_where_a_pipeline_saved(tmp_path: Path) -> None:
    run, kind = saving_after(run_of(tmp_path, "stateful own", {"max_epochs": 1}), 3), "stateful own"
    (whole,) = ONE_PROCESS.run(2, fit_showing, run, kind, "")
    again = replace(as_plain(run), callbacks=(), ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert flat(fit_showing(again, kind, "")["numbers"]) == flat(whole["numbers"])[3 * run.batch_size :]


def as_plain(run: Run) -> Run:
    return replace(run, strategy="plain", options={})


def flat(numbers: list[list[int]]) -> list[int]:
    return [number for batch in numbers for number in batch]


def fit_warned(run: Run, kind: str) -> tuple[list[str], list[int]]:
    """Train, and return the warnings about inexact resuming and the step count after each batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = fit_showing(run, kind, "")["steps"]
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "the rest of the epoch is not resumed exactly" in text], steps


@pytest.mark.parametrize(
    ("kind", "then", "reason"),
    [
        ("plain", "plain", "a DataLoader cannot save its position"),
        ("stateful", "stateful workers", "with another loader, or another num_workers"),
    ],
)
def test_a_loader_without_a_state_begins_its_epoch_again_and_says_so(
    kind: str, then: str, reason: str, pools: Pools, tmp_path: Path
) -> None:
    run = saving_after(run_of(tmp_path, kind, TWO_EPOCHS), 3)
    ONE_PROCESS.run(2, fit_showing, run, kind, "")
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=3.ckpt"))
    (first, steps), *others = (pools if kind == "plain" else ONE_PROCESS).run(2, fit_warned, again, then)
    (warning,) = first
    assert "after batch 3 of an epoch" in warning
    assert reason in warning
    assert not any(warnings for warnings, _ in others)
    assert steps == list(range(4, 11))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["litdata workers", "stateful noisy own sampler"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_after_every_batch(pools: Pools, kind: str, stages: int, replicas: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind, EPOCHS, options={"data_parallel_size": replicas})
    check_resumed(pools, run, kind, tmp_path, range(1, 12 if replicas == 1 else 6), stages)
