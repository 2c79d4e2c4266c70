"""A process that ends between the newer checkpoint and the removal of the older one leaves nothing for ever."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.trainer.checkpoint.test_checkpoints import RUN, TRAINER, ResumableNet
from tests.trainer.pool import Pools
from tests.trainer.runs import Run, fit


class DiesFirst(ModelCheckpoint):
    """Its run ends when it would remove the checkpoint of a step."""

    def __init__(self, at: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.at = at

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if f"step={self.at}" in filepath:
            raise KeyError("the process ends here")
        super()._remove_checkpoint(trainer, filepath)


class Falling(ResumableNet):
    """Logs what falls, so that each checkpoint is better than the one before."""

    train_dataloader = ResumableNet.train_dataloader

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("falling", -float(self.global_step))


def run_of(folder: Path, at: int = 0, kept: dict[str, Any] | None = None, **options: Any) -> Run:
    keeping = {"dirpath": folder, "every_n_train_steps": 1, "filename": "{step}", **(kept or {"save_top_k": 1})}
    return replace(
        RUN, module=Falling, callbacks=((DiesFirst, {"at": at, **keeping}),), options=options,
        trainer=TRAINER | {"max_epochs": 2, "logger": False},
    )  # fmt: skip


NEWEST = {"save_top_k": 1}
BEST = {"save_top_k": 2, "monitor": "falling"}


@pytest.mark.parametrize(
    ("kept", "options", "left"),
    [
        (NEWEST, {}, {3, 10}),
        (NEWEST, {"state_dict_type": "sharded", "async_checkpoints": True}, {3, 10}),
        (BEST, {}, {5, 9, 10}),
        ({"save_top_k": -1}, {}, set(range(1, 11))),
    ],
)
def test_what_is_left_goes_with_the_resume(
    pools: Pools, tmp_path: Path, kept: dict[str, Any], options: dict[str, Any], left: set[int]
) -> None:
    """Lightning itself keeps the checkpoint that a run goes on from."""
    ends_at = 3 if kept is BEST else 2  # the first checkpoint with a value is that of step 3
    outcomes = pools.outcomes(2, fit, run_of(tmp_path, ends_at, kept, **options))
    is_ended = kept["save_top_k"] > 0
    assert outcomes[0].error == ("KeyError" if is_ended else "")
    resumed_from = max(left - {9, 10}) if is_ended else 4
    assert is_ended is not (tmp_path / f"step={resumed_from + 1}.ckpt").exists()
    assert (tmp_path / f"step={ends_at}.ckpt").exists()
    ckpt_path = str(tmp_path / f"step={resumed_from}.ckpt")
    pools.run(2, fit, replace(run_of(tmp_path, 0, kept, **options), ckpt_path=ckpt_path))
    assert {name for name in os.listdir(tmp_path) if "-v1" not in name} == {f"step={step}.ckpt" for step in left}


def test_an_earlier_checkpoint_removes_nothing_of_later_ones(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, fit, run_of(tmp_path, kept={"save_top_k": -1}))
    resumed = replace(run_of(tmp_path, kept={"save_top_k": 1, "filename": "new-{step}"}))
    pools.run(2, fit, replace(resumed, ckpt_path=str(tmp_path / "step=2.ckpt")))
    assert {f"step={step}.ckpt" for step in range(2, 6)} <= set(os.listdir(tmp_path))
