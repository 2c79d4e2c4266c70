"""A run that goes on from a checkpoint is the uninterrupted one: batches, weights, losses, and metrics of epochs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor

from tests.trainer.checkpoint.resumable import SavesAfter, Showing, fit_showing, write_litdata
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights
from tests.trainer.runs import Net, Run

EPOCHS = {"max_epochs": 3}
TWO_EPOCHS = {"max_epochs": 2}
STEPS = {"max_steps": 12, "max_epochs": -1}
SAVING = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": 1}


def run_of(folder: Path, kind: str, trainer: dict[str, Any], val_samples: tuple[int, ...] = (), **more: Any) -> Run:
    options = {"gradient_clip_val": 0.5, "enable_checkpointing": True, "logger": "list"}
    return Run(
        Net, dropout=0.2, optimizer="muon", error_feedback=True, val_samples=val_samples,
        shuffle="own" not in kind,
        callbacks=((SavesAfter, {"dirpath": folder} | SAVING),), trainer=options | trainer,
        **{"strategy": "default", "scheduler": "decay-step", "samples": 37} | more,
    )  # fmt: skip


def saving_after(run: Run, *steps: int) -> Run:
    """The same, saving after these steps alone."""
    *callbacks, (saves, options) = run.callbacks
    return replace(run, callbacks=(*callbacks, (saves, options | {"steps": steps})))


def check(
    pools: Pools,
    run: Run,
    kind: str,
    folder: Path,
    steps: list[int],
    stages: int = 2,
    fit: Any = fit_showing,
) -> list[Any]:
    """Resumed after each of the steps, the rest equals that of the whole run, which is returned."""
    if "litdata" in kind:
        write_litdata(folder / "data", run.samples)
    processes = stages * run.options.get("data_parallel_size", 1)
    saving = saving_after(run, *steps) if run.callbacks[-1][0] is SavesAfter else run
    whole = pools.run(processes, fit, saving, kind, str(folder / "data"))
    for step in steps:
        again = replace(run, callbacks=run.callbacks[:-1], ckpt_path=str(folder / f"step={step}.ckpt"))
        resumed = pools.run(processes, fit, again, kind, str(folder / "data"))
        assert resumed[0]["numbers"]
        assert resumed[0]["numbers"] == whole[0]["numbers"][-len(resumed[0]["numbers"]) :], step
        assert resumed[0]["records"] == whole[0]["records"][whole[0]["marks"][step] :], step
        assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
    return whole


@pytest.mark.parametrize(
    ("kind", "trainer", "stages"),
    [
        pytest.param("litdata", EPOCHS, 2, marks=pytest.mark.slow),  # with an emulated delay by default
        pytest.param("stateful noisy", STEPS, 3, marks=pytest.mark.slow),
        ("stateful noisy own sampler", STEPS, 3),
        pytest.param("plain", EPOCHS, 3, marks=pytest.mark.slow),
        pytest.param("plain own sampler", EPOCHS, 2, marks=pytest.mark.slow),
        pytest.param("plain generator", EPOCHS, 2, marks=pytest.mark.slow),
        pytest.param("plain generator own sampler", EPOCHS, 2, marks=pytest.mark.slow),
    ],
)
def test_after_any_batch(pools: Pools, kind: str, trainer: dict[str, Any], stages: int, tmp_path: Path) -> None:
    """In mid-epoch and at an epoch's last batch, whose epoch's end is still to come; a plain loader at the latter."""
    check(pools, run_of(tmp_path, kind, trainer), kind, tmp_path, [10] if "plain" in kind else [3, 10], stages)


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
    for step in (5,) if at_epoch_end else (5, 10):  # a run that has come to its end does not begin again
        again = replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        resumed = pools.run(processes, fit_showing, again, "plain", "")[0]
        assert resumed["records"] == whole["records"][whole["marks"][step] :]
        assert resumed["epoch"] == whole["epoch"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trainer"), [("litdata", EPOCHS), ("plain", STEPS)], ids=["litdata", "plain"])
def test_a_middle_stage_ends_the_epoch_with_the_others(
    pools: Pools, kind: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    """It reads placeholders, of which there always are some, and which have a state if what is read elsewhere has."""
    check(pools, run_of(tmp_path, kind, trainer), kind, tmp_path, [10], stages=3)


@pytest.mark.parametrize("kind", ["litdata", pytest.param("stateful noisy", marks=pytest.mark.slow)])
def test_an_emulated_delay_after_any_batch(pools: Pools, kind: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind, EPOCHS, strategy="delayed", options={"micro_batches": 2})
    check(pools, run, kind, tmp_path, [3, 10], stages=1)


@pytest.mark.parametrize(
    "trainer",
    [TWO_EPOCHS | {"val_check_interval": 2}, pytest.param(STEPS, marks=pytest.mark.slow)],
    ids=["in mid-epoch", "at an epoch's end"],
)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("default", {}), ("delayed", {}), pytest.param("delayed", {"micro_batches": 2}, marks=pytest.mark.slow)],
    ids=["default", "delayed", "delayed micro-batches"],
)
def test_before_a_validation(
    pools: Pools, strategy: str, options: dict[str, Any], trainer: dict[str, Any], tmp_path: Path
) -> None:
    """The resumed run begins with it."""
    schedule = "plateau-epoch-val_loss" if strategy == "default" else "decay-step"
    run = run_of(tmp_path, "litdata", trainer, val_samples=(9,), scheduler=schedule, strategy=strategy, options=options)
    check(pools, run, "litdata", tmp_path, [5, 7], stages=2 if strategy == "default" else 1)


@pytest.mark.parametrize(("strategy", "stages"), [("default", 2), pytest.param("delayed", 1, marks=pytest.mark.slow)])
def test_where_the_accumulation_changes_with_the_epoch(
    strategy: str, stages: int, pools: Pools, tmp_path: Path
) -> None:
    """Lightning's callback sets it when an epoch begins, which a run that is resumed in one does not see."""
    run = run_of(tmp_path, "stateful", TWO_EPOCHS, strategy=strategy)
    scheduled = (GradientAccumulationScheduler, {"scheduling": {1: 2}})
    run = replace(run, callbacks=(scheduled, *run.callbacks))
    check(pools, run, "stateful", tmp_path, [5, 7], stages)


@pytest.mark.parametrize(
    ("kind", "validating", "step"),
    [
        ("stateful", {"val_check_interval": 2}, 2),
        pytest.param("litdata", {}, 5, marks=pytest.mark.slow),
        pytest.param("plain", {}, 5, marks=pytest.mark.slow),
    ],
    ids=["in mid-epoch", "at an epoch's end", "plain"],
)
def test_saved_by_the_validation_that_a_resumed_run_begins_with(
    kind: str, validating: dict[str, Any], step: int, pools: Pools, tmp_path: Path
) -> None:
    """Before it has read a batch: the data and the random numbers go on from where the first checkpoint was."""
    run = saving_after(run_of(tmp_path, kind, TWO_EPOCHS | validating, val_samples=(9,)), step)
    write_litdata(tmp_path / "data", run.samples)
    whole = pools.run(2, fit_showing, run, kind, str(tmp_path / "data"))[0]
    saving = {"dirpath": tmp_path, "save_top_k": -1, "filename": "validated {step}", "monitor": "val_loss"}
    again = replace(run, callbacks=((ModelCheckpoint, saving),), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
    pools.run(2, fit_showing, again, kind, str(tmp_path / "data"))
    third = replace(run, callbacks=(), ckpt_path=str(tmp_path / f"validated step={step}.ckpt"))
    (resumed, _) = pools.run(2, fit_showing, third, kind, str(tmp_path / "data"))
    assert len(resumed["steps"]) == len(whole["steps"]) - step
    for name in ("steps", "numbers", "records"):
        assert resumed[name]
        assert resumed[name] == whole[name][-len(resumed[name]) :], name


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
    """Its metrics are still to be logged, and the learning rate to be decided on with them."""
    saving = {"save_top_k": -1, "filename": "{step}", "every_n_epochs": 1, "save_on_train_epoch_end": at_the_end}
    run = run_of(tmp_path, "plain", trainer, val_samples=(9,), scheduler="plateau-epoch-train_loss")
    run = replace(run, callbacks=((ModelCheckpoint, {"dirpath": tmp_path} | saving),))
    check(pools, run, "plain", tmp_path, [5, 10])


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
    check(pools, run, "stateful", tmp_path, [4, 8], 2)


class Skipping(Showing):
    """Ends every epoch before its fourth batch, of five."""

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


@pytest.mark.parametrize(
    ("strategy", "stages", "kind"),
    [
        ("default", 3, "litdata"),
        pytest.param("default", 2, "stateful own sampler torchs", marks=pytest.mark.slow),
        ("delayed", 1, "plain"),
    ],
)
def test_where_a_hook_ends_the_epochs(strategy: str, stages: int, kind: str, pools: Pools, tmp_path: Path) -> None:
    """Their last batch was read, and never completed."""
    run = run_of(tmp_path, kind, EPOCHS, val_samples=(9,), strategy=strategy)
    saving = {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}", "save_on_train_epoch_end": True}
    run = replace(run, callbacks=((ModelCheckpoint, saving),))
    check(pools, run, kind, tmp_path, [3, 6], stages, partial(fit_showing, make=Skipping))


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
    check(pools, run, kind, tmp_path, list(range(1, 12 if replicas == 1 else 6)), stages)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    "validating", [{"val_check_interval": 2}, {"check_val_every_n_epoch": None, "val_check_interval": 4}, {}]
)
@pytest.mark.parametrize("scheduler", ["decay-epoch", "plateau-epoch-val_loss", "plateau-step-train_loss"])
def test_around_every_validation(
    pools: Pools, trainer: dict[str, Any], validating: dict[str, Any], scheduler: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, "litdata", trainer | validating, val_samples=(9,), scheduler=scheduler)
    check(pools, run, "litdata", tmp_path, list(range(1, 12)))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_with_a_state_is_shuffled_as_one_without(replicas: int, pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, "plain", TWO_EPOCHS, options={"data_parallel_size": replicas})
    run = replace(run, callbacks=())
    stateful, plain = (pools.run(2 * replicas, fit_showing, run, kind, "") for kind in ("stateful", "plain"))
    assert [rank["numbers"] for rank in stateful] == [rank["numbers"] for rank in plain]
    numbers = [number for rank in stateful for batch in rank["numbers"] for number in batch]
    assert set(numbers) == set(range(run.samples))
