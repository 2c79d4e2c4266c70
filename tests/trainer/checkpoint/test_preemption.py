"""A run that is told to stop ends on all ranks, and resumes as if it had never been interrupted."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS, RESUMABLE_RUN, RESUMABLE_TRAINER, OneProcess, saving
from tests.helpers.trainer import Net, Run, Samples, evaluate, fit


class Resumable(Net):
    """Model with a stateful, shuffled loader, whose validation has random numbers and a torchmetrics object."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.val_mse = MeanSquaredError()

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(Samples(self.run.samples), batch_size=self.run.batch_size, shuffle=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        output = self.model(batch["x"])
        self.log("val_loss", (1 + 0.1 * torch.rand(())) * F.mse_loss(output, batch["y"]), prog_bar=True)
        if dataloader_idx == 0:
            self.val_mse(output, batch["y"])
            self.log("val_mse", self.val_mse)


@dataclass
class Signals(L.Callback):
    """Callback that signals its own process in a hook on some ranks; the hook ``on_sanity`` is in the sanity check."""

    ranks: tuple[int, ...]
    hook: str
    index: int = 0
    number: int = signal.SIGTERM
    calls: int = 0

    def __post_init__(self) -> None:
        hook = "on_validation_batch_end" if self.hook == "on_sanity" else self.hook
        setattr(self, hook, self._called)

    def _called(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking != (self.hook == "on_sanity"):
            return
        if self.calls == self.index and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)
            os.kill(os.getpid(), self.number)  # the second signal has no effect
        self.calls += 1


class Records(L.Callback):
    """Callback that records steps and validations, which are kept if the run ends with an exception."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.validations = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.validations += not trainer.sanity_checking


def under_slurm(run: Run, folder: str) -> dict[str, Any]:
    """Run :func:`preempted` as a task of a SLURM job whose ``scontrol`` is in the folder."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    with patch.dict(
        os.environ, SLURM_NTASKS=world, SLURM_NTASKS_PER_NODE=world, SLURM_PROCID=rank, SLURM_LOCALID=rank,
        SLURM_NODEID="0", SLURM_JOB_ID="4711", SLURM_JOB_NAME="train", PATH=f"{folder}:{os.environ['PATH']}",
    ):  # fmt: skip
        return preempted(replace(run, trainer={**run.trainer, "plugins": SLURMEnvironment()}))


def preempted(run: Run, what: str = "fit") -> dict[str, Any]:
    """Fit or evaluate, and return the exit code and the steps and validations up to then."""
    records = Records()
    run = replace(run, callbacks=(*run.callbacks, (lambda: records, {})))
    result: dict[str, Any] = {"code": 0}
    try:
        result |= fit(run) if what == "fit" else evaluate(run, what)
    except SystemExit as end:
        result["code"] = end.code
    return {**result, "steps": records.steps, "validations": records.validations}


NET = replace(RESUMABLE_RUN, module=Resumable, trainer=RESUMABLE_TRAINER)  # 5 batches an epoch
EPOCHS: dict[str, Any] = {"max_epochs": 2}
STEPS = {"max_epochs": -1, "max_steps": 12}
OFTEN = {**EPOCHS, "val_check_interval": 2}
OVER_EPOCHS = {**STEPS, "val_check_interval": 3, "check_val_every_n_epoch": None}
TWO = (9, 20)  # samples of two loaders, of 2 and 3 batches

# Trainer arguments, validation samples, hook, index, last training step, number of complete validations
CASES = {
    "in training": (EPOCHS, (), "on_train_batch_end", 1, 3, 0),
    "at an epoch's end, counting steps": (STEPS, (), "on_train_batch_end", 3, 5, 0),
    "with a validation due": (OFTEN, TWO, "on_train_batch_end", 3, 4, 1),
    "in a validation": (OFTEN, TWO, "on_validation_batch_end", 6, 4, 1),
    "in an epoch's last validation": (EPOCHS, (50,), "on_validation_batch_end", 2, 5, 0),
    "in the last validation": (OVER_EPOCHS, (30,), "on_validation_batch_end", 13, 12, 3),
    "after a validation": (OFTEN, TWO, "on_validation_end", 1, 5, 2),
    "while it saves": (OFTEN, TWO, "on_save_checkpoint", 1, 4, 1),
    "between epochs": (EPOCHS, (20,), "on_train_epoch_start", 1, 7, 1),
}  # fmt: skip
WHOLE: dict[str, list[Any]] = {}  # results of uninterrupted runs


def run_of(folder: Path, trainer: dict[str, Any], vals: tuple[int, ...] = (), *more: Any, **changes: Any) -> Run:
    """Return a run that keeps ``last.ckpt`` and, with validation, the two best checkpoints."""
    monitor = "val_loss/dataloader_idx_0" if len(vals) > 1 else "val_loss"
    when = {"monitor": monitor, "save_top_k": 2} if vals else {}
    callbacks = (saving(folder, save_last=True, **when), *more)
    return replace(NET, trainer=RESUMABLE_TRAINER | trainer, val_samples=vals, callbacks=callbacks, **changes)


def check_preempted(
    pools: Pools | OneProcess, world: int, folder: Path, trainer: dict[str, Any], vals: tuple[int, ...],
    tell: dict[str, Any], *more: Any, **changes: Any,
) -> list[Any]:  # fmt: skip
    """Check that all ranks stop and resume exactly, in one process unless there are replicas; return their results."""
    told, pools = pools, pools if "data_parallel_size" in changes.get("options", {}) else ONE_PROCESS
    key = str((world, trainer, vals, changes))
    if key not in WHOLE:
        WHOLE[key] = pools.run(world, preempted, run_of(folder / "whole", trainer, vals, **changes))
    whole = WHOLE[key]
    broken = told.run(world, preempted, run_of(folder, trainer, vals, (Signals, tell), *more, **changes))
    last = run_of(folder, trainer, vals, ckpt_path=str(folder / "last.ckpt"), **changes)
    resumed = pools.run(world, preempted, last)
    assert [{result["code"] for result in results} for results in (broken, resumed)] == [{143}, {0}]
    stages = world // changes.get("options", {}).get("data_parallel_size", 1)
    assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
    assert resumed[0]["global_step"] == whole[0]["global_step"]
    if resumed[0]["steps"]:  # otherwise Lightning does not count an epoch cut short by the last step
        assert resumed[0]["epoch"] == whole[0]["epoch"]
    return broken


RARER = ("at an epoch's end, counting steps", "in an epoch's last validation", "after a validation")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in RARER else []) for c in CASES])
def test_resumed_as_if_never_interrupted(case: str, tmp_path: Path) -> None:
    trainer, vals, hook, index, _, validations = CASES[case]
    (broken,) = check_preempted(ONE_PROCESS, 2, tmp_path, trainer, vals, {"ranks": (0,), "hook": hook, "index": index})
    assert broken["validations"] == validations


def test_a_signal_reaches_a_stage_in_the_middle_alone(pools: Pools, tmp_path: Path) -> None:
    """A signal to the middle stage alone stops all ranks, and a callback may still save a checkpoint after that."""
    trainer, vals, hook, index, step, validations = CASES["in a validation"]
    more = (OnExceptionCheckpoint, {"dirpath": tmp_path})
    broken = check_preempted(pools, 3, tmp_path, trainer, vals, {"ranks": (1,), "hook": hook, "index": index}, more)
    assert [(result["steps"][-1], result["validations"]) for result in broken] == [(step, validations)] * 3
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == step


def test_a_replica_is_told(pools: Pools, tmp_path: Path) -> None:
    tell = {"ranks": (1,), "hook": "on_validation_batch_end", "index": 2}
    check_preempted(pools, 2, tmp_path, OFTEN, (90,), tell, options={"data_parallel_size": 2, "microbatches": 2})


@pytest.mark.slow
def test_agreed_on_within_a_batch_it_ends_with_the_mini_batch(pools: Pools, tmp_path: Path) -> None:
    """A stop that is agreed on between two microbatches, as updates are, waits for all batches of the mini-batch."""
    tell = {"ranks": (0, 1, 2), "hook": "on_train_batch_end"}
    trainer = {**EPOCHS, "accumulate_grad_batches": 2}
    options = {"staleness": "least", "slack": "exact", "microbatches": 4, "partition": "uniform"}
    check_preempted(pools, 3, tmp_path, trainer, (90,), tell, options=options)


def test_evaluations_end_on_all_ranks_without_a_checkpoint(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, {"num_sanity_val_steps": 4}, (50,), (Signals, {"ranks": (0,), "hook": "on_sanity"}))
    assert [result["code"] for result in pools.run(3, preempted, run)] == [143] * 3
    run = run_of(tmp_path, {}, (90,), (Signals, {"ranks": (0,), "hook": "on_predict_batch_end", "index": 1}))
    assert [result["code"] for result in pools.run(3, preempted, run, "predict")] == [143] * 3
    assert not list(tmp_path.iterdir())


def test_a_signal_at_the_end_changes_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"max_epochs": 1}, (), (Signals, {"ranks": (0,), "hook": "on_train_end"}))
    assert ONE_PROCESS.run(2, preempted, run)[0]["code"] == 0


LINK = {"save_last": "link", "every_n_train_steps": 3, "filename": "{step}"}
FILES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "no last": ({}, {"last.ckpt"}),
    "weights only": ({"save_weights_only": True}, set()),
    "a link": (LINK, {"last.ckpt", "step=3.ckpt"}),
}


@pytest.mark.parametrize("case", FILES)
def test_where_the_checkpoint_lies(case: str, tmp_path: Path) -> None:
    options, files = FILES[case]
    tell = (Signals, {"ranks": (0,), "hook": "on_train_batch_end", "index": 2})
    run = replace(NET, callbacks=((ModelCheckpoint, {"dirpath": str(tmp_path), **options}), tell))
    (broken,) = ONE_PROCESS.run(2, preempted, run)
    assert broken["code"] == 143
    assert {path.name for path in tmp_path.iterdir()} == files
    for path in tmp_path.iterdir():
        assert not path.is_symlink()
        step = 3 if path.name.startswith("step") else broken["steps"][-1]
        assert torch.load(path, weights_only=True)["global_step"] == step


@pytest.mark.parametrize(
    ("number", "calls"), [(signal.SIGUSR1, "requeue 4711 hpc_ckpt_1.ckpt last.ckpt\n"), (signal.SIGTERM, "")]
)
def test_slurm_requeues_after_the_checkpoint_and_resumes_from_it(
    pools: Pools, number: int, calls: str, tmp_path: Path
) -> None:
    """SIGUSR1 requeues the job after a save; a fake ``scontrol`` records its arguments and the existing checkpoints."""
    noted, script, root = tmp_path / "calls", tmp_path / "scontrol", tmp_path / "root"
    noted.touch()
    script.write_text(f'#!/bin/sh\necho "$@" $(ls {root}) >> {noted}\n')
    script.chmod(0o755)
    trainer = {"max_epochs": 2, "default_root_dir": str(root)}
    tell = (Signals, {"ranks": (0, 1), "hook": "on_train_batch_end", "index": 1, "number": number})
    broken = pools.run(2, under_slurm, run_of(root, trainer, (), tell), str(tmp_path))
    assert [result["code"] for result in broken] == [128 + number] * 2
    assert noted.read_text() == calls
    if number == signal.SIGUSR1:
        (whole,) = ONE_PROCESS.run(2, preempted, run_of(tmp_path / "whole", trainer))
        resumed = pools.run(2, under_slurm, run_of(root, trainer), str(tmp_path))
        assert_equal_weights(joined_weights(resumed, 2), whole["weights"])
