"""Real runs that are killed at any moment, or whose disk fails: a complete checkpoint is always there."""

from __future__ import annotations

import errno
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.storage import load
from tests.helpers.pool import Pools, TrainerPool, impatient
from tests.helpers.resumable import RESUMABLE_RUN, RESUMABLE_TRAINER, ResumableNet
from tests.helpers.trainer import Run, fit

SHARDED = {"state_dict_type": "sharded"}
BEHIND = {"async_checkpoints": True}
FIRST = 8  # calls of fsync on rank 0 in the first sharded save, before which there is no checkpoint


def run_of(folder: Path, epochs: int, **options: Any) -> Run:
    """Keeps its newest checkpoint alone."""
    keeping = {"dirpath": folder, "save_top_k": 1, "every_n_train_steps": 1, "filename": "{step}"}
    trainer = RESUMABLE_TRAINER | {"max_epochs": epochs, "logger": False}
    return replace(
        RESUMABLE_RUN, module=ResumableNet, callbacks=((ModelCheckpoint, keeping),), trainer=trainer, options=options
    )


def killed(run: Run, folder: Path, after: float) -> None:
    """Start a run of two stages, and kill both some seconds after its first checkpoint."""
    pool = TrainerPool(2)
    try:
        for task in pool._tasks:
            task.put((fit, (run,)))
        deadline = time.monotonic() + 150
        while not list(folder.glob("*.ckpt")):
            assert time.monotonic() < deadline, "no checkpoint within 150 s"
            time.sleep(0.005)
        time.sleep(after)
    finally:
        pool.close()


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))],  # both ways of saving, and both forms
)
def test_killed_at_any_moment(seed: int, pools: Pools, tmp_path: Path) -> None:
    """With ``save_top_k=1``, which removes the older one when the newer is complete."""
    options = (SHARDED | BEHIND, BEHIND, SHARDED, {})[seed % 4]
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    killed(run_of(folder, 1000, **options), folder, random.Random(seed).uniform(0, 0.5))
    found = list(folder.glob("*.ckpt"))
    assert 1 <= len(found) <= 3, found  # the one before, the newest, and one that was about to go
    for path in found:
        assert load(path)["global_step"] == int(path.stem.partition("=")[2])
    step = max(int(path.stem.partition("=")[2]) for path in found)
    resumed = replace(run_of(folder, -1, **options), ckpt_path=str(folder / f"step={step}.ckpt"))
    resumed = replace(resumed, trainer=resumed.trainer | {"max_steps": step + 2})
    assert pools.run(2, fit, resumed)[0]["global_step"] == step + 2
    load(folder / f"step={step + 2}.ckpt")


def fit_with_a_failing_disk(run: Run, rank: int, at: int) -> tuple[str, str]:
    """One ``fsync`` on a rank fails; what the run came to there."""
    fsync, calls = os.fsync, []

    def fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at and int(os.environ["RANK"]) == rank:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    os.fsync = fails  # type: ignore[assignment]
    try:
        fit(run)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        os.fsync = fsync
    return "", ""


@pytest.mark.parametrize(
    ("rank", "at", "options"),
    [
        (1, 2, SHARDED | BEHIND),
        *(pytest.param(0, *row, marks=pytest.mark.slow) for row in ((5, BEHIND), (8, SHARDED), (14, SHARDED), (1, {}))),
    ],
)
def test_a_disk_that_fails(rank: int, at: int, options: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    """The whole run ends with the cause, and what is there is whole."""
    outcomes = pools.run(2, impatient, fit_with_a_failing_disk, run_of(tmp_path, 3, **options), rank, at, timeout=120)
    assert outcomes[rank][0] == "StorageError"
    for _, message in outcomes:
        assert re.search(r"could not be written: OSError: .*Input/output error", message), outcomes
    found = list(tmp_path.glob("*.ckpt"))
    assert bool(found) == (rank == 1 or at > (FIRST if "state_dict_type" in options else 1))
    for path in found:
        load(path)
    assert not list(tmp_path.glob(".*.partial"))
