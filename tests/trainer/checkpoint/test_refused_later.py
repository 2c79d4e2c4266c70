"""A checkpoint that no training goes on from says so when it is written, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, fit_and_hear

SAID = "no training will go on from it: a DataLoader cannot go on in the middle of an epoch"


def saving(folder: Path, **when: int) -> Run:
    trainer = {"enable_checkpointing": True, "max_epochs": 2}
    return Run(Net, callbacks=((ModelCheckpoint, {"dirpath": folder, "save_top_k": -1, **when}),), trainer=trainer)


def test_a_plain_loader(pools: Pools, tmp_path: Path) -> None:
    run = saving(tmp_path, every_n_train_steps=1)
    first, other = pools.run(2, fit_and_hear, run, SAID)
    assert len(first[1]) == 1
    assert "a checkpoint is written after batch 1 of an epoch" in first[1][0]
    assert other[1] == []
    again = replace(run, ckpt_path=str(next(tmp_path.glob("*step=1.ckpt"))))
    assert all(
        "Resume from a checkpoint of an epoch's end" in o.message for o in pools.outcomes(2, fit_and_hear, again, "")
    )


@pytest.mark.parametrize(
    ("when", "trainer"),
    [
        ({"every_n_epochs": 1}, {}),
        ({"every_n_train_steps": 1}, {"max_steps": 3, "options": {"inexact_resume": True}}),
    ],
    ids=["at the ends of epochs", "accepted"],
)
def test_nothing_is_said(when: dict[str, int], trainer: dict, pools: Pools, tmp_path: Path) -> None:
    run = saving(tmp_path, **when)
    options = trainer.pop("options", {})
    run = replace(run, trainer=run.trainer | trainer, options=options)
    assert pools.run(1, fit_and_hear, run, SAID)[0][1] == []


def test_a_run_that_max_steps_ends_in_mid_epoch(pools: Pools, tmp_path: Path) -> None:
    run = saving(tmp_path, every_n_epochs=1)
    run = replace(run, trainer=run.trainer | {"max_steps": 1})
    assert len(pools.run(1, fit_and_hear, run, SAID)[0][1]) == 1
