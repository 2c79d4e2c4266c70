"""Real runs that are killed at any moment: a complete checkpoint is always there."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.storage import load
from tests.helpers.pool import Pools, TrainerPool
from tests.helpers.resumable import RESUMABLE_RUN, RESUMABLE_TRAINER, ResumableNet
from tests.helpers.trainer import Run, fit

SHARDED = {"state_dict_type": "sharded"}
BEHIND = {"async_checkpoints": True}


def run_of(folder: Path, epochs: int, **options: object) -> Run:
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
