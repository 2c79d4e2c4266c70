"""A run that is told to end ends on all ranks, and the resumed one goes on as if it had never been interrupted."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import RESUMABLE_RUN, RESUMABLE_TRAINER, saving
from tests.helpers.trainer import Run
from tests.trainer.checkpoint.preempted import Resumable, Signals, preempted, under_slurm

NET = replace(RESUMABLE_RUN, module=Resumable, trainer=RESUMABLE_TRAINER)  # 5 batches an epoch, 3 epochs
EPOCHS: dict[str, Any] = {}
STEPS = {"max_epochs": -1, "max_steps": 12}
OFTEN = {"val_check_interval": 2}
OVER_EPOCHS = {**STEPS, "val_check_interval": 3, "check_val_every_n_epoch": None}
TWO = (9, 20)  # samples of two loaders, of 2 and 3 batches

# Trainer's arguments, validation samples, hook, index: the last training batch, complete validations until the end
CASES = {
    "in training": (EPOCHS, (), "on_train_batch_end", 1, 3, 0),
    "at an epoch's end": (EPOCHS, (), "on_train_batch_end", 3, 5, 0),
    "at an epoch's end, counting steps": (STEPS, (), "on_train_batch_end", 3, 5, 0),
    "with a validation due": (OFTEN, TWO, "on_train_batch_end", 3, 4, 1),
    "with the last validation due": (OVER_EPOCHS, (30,), "on_train_batch_end", 9, 12, 3),
    "in a validation": (OFTEN, TWO, "on_validation_batch_end", 6, 4, 1),
    "in an epoch's last validation": (EPOCHS, (50,), "on_validation_batch_end", 8, 10, 1),
    "in an epoch's last validation, counting steps": (STEPS, (50,), "on_validation_batch_end", 1, 5, 0),
    "in a validation over epochs": (OVER_EPOCHS, (50,), "on_validation_batch_end", 1, 3, 0),
    "in the last validation": (OVER_EPOCHS, (30,), "on_validation_batch_end", 13, 12, 3),
    "at a validation's end": (OFTEN, TWO, "on_validation_batch_end", 4, 2, 0),
    "after a validation": (OFTEN, TWO, "on_validation_end", 1, 5, 2),
    "while it saves": (OFTEN, TWO, "on_save_checkpoint", 1, 4, 1),
    "between epochs": (EPOCHS, (20,), "on_train_epoch_start", 1, 7, 1),
}  # fmt: skip
DEFAULT = ("at an epoch's end, counting steps",)  # others below are told in validations


def run_of(folder: Path, trainer: dict[str, Any], vals: tuple[int, ...], *more: Any, **changes: Any) -> Run:
    """A run that keeps its last checkpoint, and with validation the best ones."""
    monitor = "val_loss/dataloader_idx_0" if len(vals) > 1 else "val_loss"
    when = {"monitor": monitor, "save_top_k": 2} if vals else {}
    callbacks = (saving(folder, save_last=True, **when), *more)
    return replace(NET, trainer=RESUMABLE_TRAINER | trainer, val_samples=vals, callbacks=callbacks, **changes)


def check_resumed(whole: list[Any], resumed: list[Any], stages: int) -> None:
    assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
    assert [resumed[0][name] for name in ("epoch", "global_step")] == [whole[0][n] for n in ("epoch", "global_step")]


@pytest.mark.parametrize(
    "case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_resumed_as_if_never_interrupted(pools: Pools, case: str, tmp_path: Path) -> None:
    """The signal reaches a stage in the middle alone."""
    trainer, vals, hook, index, step, validations = CASES[case]
    whole = pools.run(3, preempted, run_of(tmp_path / "whole", trainer, vals))
    tell = (Signals, {"ranks": (1,), "hook": hook, "index": index})
    broken = pools.run(3, preempted, run_of(tmp_path, trainer, vals, tell))
    assert [result["code"] for result in broken] == [143] * 3
    assert [result["seen"]["steps"][-1] for result in broken] == [step] * 3
    assert {result["seen"]["validations"] for result in broken} == {validations}
    last = run_of(tmp_path, trainer, vals, ckpt_path=str(tmp_path / "last.ckpt"))
    resumed = pools.run(3, preempted, last)
    assert {result["code"] for result in resumed} == {0}
    check_resumed(whole, resumed, 3)


@pytest.mark.parametrize(
    "hook", [pytest.param("on_train_batch_end", marks=pytest.mark.slow), "on_validation_batch_end"]
)
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"options": {"data_parallel_size": 2, "microbatches": 2}}),
        pytest.param(4, {"options": {"data_parallel_size": 2, "microbatches": 3}}, marks=pytest.mark.slow),
        pytest.param(3, {"strategy": "sync", "options": {"microbatches": 1}}, marks=pytest.mark.slow),
    ],
)
def test_replicas_and_other_schedules(
    pools: Pools, world: int, changes: dict[str, Any], hook: str, tmp_path: Path
) -> None:
    trainer = {**OFTEN, "max_epochs": 2}
    whole = pools.run(world, preempted, run_of(tmp_path / "whole", trainer, (90,), **changes))
    tell = (Signals, {"ranks": (world - 1,), "hook": hook, "index": 2})
    broken = pools.run(world, preempted, run_of(tmp_path, trainer, (90,), tell, **changes))
    assert [result["code"] for result in broken] == [143] * world
    last = run_of(tmp_path, trainer, (90,), ckpt_path=str(tmp_path / "last.ckpt"), **changes)
    resumed = pools.run(world, preempted, last)
    stages = world // changes.get("options", {}).get("data_parallel_size", 1)
    check_resumed(whole[:stages], resumed[:stages], stages)


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_agreed_on_within_a_batch_it_ends_with_the_mini_batch(pools: Pools, index: int, tmp_path: Path) -> None:
    """With updates that all agree on between two microbatches, and several batches to an update."""
    options = {"staleness": "least", "slack": "exact", "microbatches": 4, "partition": "uniform"}
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
    whole = pools.run(3, preempted, run_of(tmp_path / "whole", trainer, (90,), options=options))
    tell = (Signals, {"ranks": (0, 1, 2), "hook": "on_train_batch_end", "index": index})
    broken = pools.run(3, preempted, run_of(tmp_path, trainer, (90,), tell, options=options))
    assert [result["code"] for result in broken] == [143] * 3
    last = run_of(tmp_path, trainer, (90,), ckpt_path=str(tmp_path / "last.ckpt"), options=options)
    check_resumed(whole, pools.run(3, preempted, last), 3)


def test_interrupted_twice(pools: Pools, tmp_path: Path) -> None:
    """The second time in the validation of the same epoch."""
    whole = pools.run(2, preempted, run_of(tmp_path / "whole", OFTEN, TWO))
    parts = []
    for index in (1, 6):
        tell = (Signals, {"ranks": (0, 1), "hook": "on_validation_batch_end", "index": index})
        last = str(tmp_path / "last.ckpt") if parts else None
        parts.append(pools.run(2, preempted, run_of(tmp_path, OFTEN, TWO, tell, ckpt_path=last)))
    resumed = pools.run(2, preempted, run_of(tmp_path, OFTEN, TWO, ckpt_path=str(tmp_path / "last.ckpt")))
    assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_the_sanity_check_ends_without_a_checkpoint(pools: Pools, ranks: tuple[int, ...], tmp_path: Path) -> None:
    tell = (Signals, {"ranks": ranks, "hook": "on_sanity"})
    run = run_of(tmp_path, {"num_sanity_val_steps": 4}, (50,), tell)
    assert [result["code"] for result in pools.run(2, preempted, run)] == [143, 143]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_an_evaluation_ends_on_all_ranks(pools: Pools, what: str, tmp_path: Path) -> None:
    hook = "on_validation_batch_end" if what == "validate" else f"on_{what}_batch_end"
    run = run_of(tmp_path, {}, (90,), (Signals, {"ranks": (0,), "hook": hook, "index": 1}))
    assert [result["code"] for result in pools.run(3, preempted, run, what)] == [143] * 3
    assert not list(tmp_path.iterdir())


def test_a_signal_at_the_end_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, {"max_epochs": 1}, (), (Signals, {"ranks": (0, 1), "hook": "on_train_end"}))
    assert [result["code"] for result in pools.run(2, preempted, run)] == [0, 0]


TELL = (Signals, {"ranks": (1,), "hook": "on_train_batch_end", "index": 2})  # they end after the fourth
KEEPS = (ModelCheckpoint, {"save_last": True, "every_n_train_steps": 100})
FILES = {
    "no last": ([(ModelCheckpoint, {})], {"last.ckpt"}),
    "the one that keeps a last": ([(ModelCheckpoint, {}), KEEPS], {"last.ckpt"}),
    "on exception": ([(OnExceptionCheckpoint, {})], {"on_exception.ckpt"}),
    "both": ([(OnExceptionCheckpoint, {}), KEEPS], {"last.ckpt", "on_exception.ckpt"}),
    "weights only": ([(ModelCheckpoint, {"save_weights_only": True})], set()),
    "a link": (
        [(ModelCheckpoint, {"save_last": "link", "every_n_train_steps": 3, "filename": "{step}"})],
        {"last.ckpt", "step=3.ckpt"},
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_where_the_checkpoint_lies(pools: Pools, case: str, tmp_path: Path) -> None:
    callbacks, files = FILES[case]
    given = tuple((make, {"dirpath": str(tmp_path), **options}) for make, options in callbacks)
    broken = pools.run(2, preempted, replace(NET, callbacks=(*given, TELL)))
    assert [result["code"] for result in broken] == [143, 143]
    assert {path.name for path in tmp_path.iterdir()} == files
    for path in tmp_path.iterdir():
        assert not path.is_symlink()
        # After a save the pipeline is drained: the next message to travel on is that of the next mini-batch.
        step = 3 if path.name.startswith("step") else 5 if case == "a link" else 4
        assert torch.load(path, weights_only=True)["global_step"] == step


def fake_scontrol(folder: Path, code: int = 0) -> Path:
    """A program that notes its arguments and which checkpoints there are by then."""
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" $(ls {folder}/root) >> {folder}/calls\nexit {code}\n')
    script.chmod(0o755)
    return script


def test_slurm_requeues_after_the_checkpoint_and_resumes_from_it(pools: Pools, tmp_path: Path) -> None:
    """SLURM sends the signal to all tasks; the run that follows finds the checkpoint by itself."""
    fake_scontrol(tmp_path)
    trainer = {"max_epochs": 2, "default_root_dir": str(tmp_path / "root")}
    whole = pools.run(2, preempted, run_of(tmp_path / "whole", trainer, ()))
    tell = (Signals, {"ranks": (0, 1), "hook": "on_train_batch_end", "index": 1, "number": signal.SIGUSR1})
    broken = pools.run(2, under_slurm, run_of(tmp_path / "root", trainer, (), tell), str(tmp_path))
    assert [result["code"] for result in broken] == [138, 138]
    assert (tmp_path / "calls").read_text().splitlines() == ["requeue 4711 hpc_ckpt_1.ckpt last.ckpt"]
    resumed = pools.run(2, under_slurm, run_of(tmp_path / "root", trainer, ()), str(tmp_path))
    check_resumed(whole, resumed, 2)


@pytest.mark.parametrize("options", [{}, {"auto_requeue": False}])
def test_sigterm_does_not_requeue(pools: Pools, options: dict[str, Any], tmp_path: Path) -> None:
    fake_scontrol(tmp_path)
    root = tmp_path / "root"
    trainer = {"max_epochs": 2, "default_root_dir": str(root)}
    tell = (Signals, {"ranks": (0,), "hook": "on_train_batch_end", "index": 1})
    broken = pools.run(2, _under_slurm_with, run_of(root, trainer, (), tell), str(tmp_path), options)
    assert [result["code"] for result in broken] == [143] * 2
    assert os.listdir(root) == ["last.ckpt"]
    assert not (tmp_path / "calls").exists()


def _under_slurm_with(run: Run, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return under_slurm(run, folder, **options)


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        pytest.param("on_train_batch_end", {}, marks=pytest.mark.slow),
        ("on_validation_batch_end", {"microbatches": 2}),
    ],
)
def test_delayed_gradient(pools: Pools, hook: str, options: dict[str, Any], tmp_path: Path) -> None:
    changes = {"strategy": "delayed", "options": options, "dropout": 0.0}
    whole = pools.run(1, preempted, run_of(tmp_path / "whole", OFTEN, (50,), **changes))
    tell = (Signals, {"ranks": (0,), "hook": hook, "index": 3})
    broken = pools.run(1, preempted, run_of(tmp_path, OFTEN, (50,), tell, **changes))
    assert [result["code"] for result in broken] == [143]
    last = run_of(tmp_path, OFTEN, (50,), ckpt_path=str(tmp_path / "last.ckpt"), **changes)
    resumed = pools.run(1, preempted, last)
    assert_equal_weights(resumed[0]["weights"], whole[0]["weights"])
    steps = [len(results[0]["seen"]["steps"]) for results in (broken, resumed, whole)]
    assert steps[0] + steps[1] == steps[2]
