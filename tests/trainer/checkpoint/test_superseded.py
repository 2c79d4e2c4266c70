"""A process that ends between the newer checkpoint and the removal of the older one leaves nothing for ever."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.core.checkpoint.origin import PIPELINE
from lightning_asyncpp.trainer.checkpoint.superseded import SUPERSEDED
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
        pytest.param(NEWEST, {}, {3, 10}, marks=pytest.mark.slow),
        (NEWEST, {"state_dict_type": "sharded", "async_checkpoints": True}, {3, 10}),
        (BEST, {}, {5, 9, 10}),
        pytest.param({"save_top_k": -1}, {}, set(range(1, 11)), marks=pytest.mark.slow),
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


def names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def resumed(folder: Path, name: str, **kept: Any) -> Run:
    return replace(run_of(folder, kept=kept or None), ckpt_path=str(folder / name))


def until(run: Run, step: int) -> Run:
    return replace(run, trainer={**run.trainer, "max_steps": step})


def test_what_a_run_went_on_from_stays_for_the_next_one_too(pools: Pools, tmp_path: Path) -> None:
    """Lightning never removes it: others may go on from it."""
    pools.run(2, fit, until(run_of(tmp_path), 2))
    pools.run(2, fit, until(resumed(tmp_path, "step=2.ckpt"), 3))
    pools.run(2, fit, until(resumed(tmp_path, "step=3.ckpt"), 4))
    assert names(tmp_path) == {"step=2.ckpt", "step=3.ckpt", "step=4.ckpt"}


@pytest.mark.parametrize("ckpt_path", [pytest.param("", marks=pytest.mark.slow), "step=1.ckpt"])
def test_what_another_run_has_written_under_the_name_stays(pools: Pools, tmp_path: Path, ckpt_path: str) -> None:
    """One that began anew, or from the same checkpoint."""
    pools.run(2, fit, until(run_of(tmp_path, kept={"save_top_k": -1}), 1))
    first, second = (resumed(tmp_path, "step=1.ckpt", save_top_k=k) for k in (1, -1))
    pools.run(2, fit, until(first, 3))
    assert names(tmp_path) == {"step=1.ckpt", "step=3.ckpt"}
    pools.run(2, fit, until(replace(second, ckpt_path=str(tmp_path / ckpt_path) if ckpt_path else None), 2))
    assert (tmp_path / "step=2.ckpt").exists()
    pools.run(2, fit, until(resumed(tmp_path, "step=3.ckpt", save_top_k=-1), 4))
    assert (tmp_path / "step=2.ckpt").exists()


def test_a_checkpoint_names_nothing_else_to_remove(pools: Pools, tmp_path: Path) -> None:
    """It is data, and may be anybody's."""
    pools.run(2, fit, until(run_of(tmp_path), 2))
    content = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    text, other = tmp_path / "text", tmp_path / "other.ckpt"
    text.write_text("mine")
    torch.save({"state_dict": {}}, other)
    stamps = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in (text, other)}
    content[PIPELINE][SUPERSEDED] = {**stamps, "\0": [1, 1], str(tmp_path): None}
    torch.save(content, tmp_path / "hostile.ckpt")
    pools.run(2, fit, until(resumed(tmp_path, "hostile.ckpt"), 3))
    assert text.exists()
    assert other.exists()


class DiesBeforeLast(ModelCheckpoint):
    """Its run ends when it would write ``last.ckpt`` at a step."""

    def __init__(self, at: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.at = at

    def _save_last_checkpoint(self, trainer: L.Trainer, candidates: dict[str, Any]) -> None:
        if trainer.global_step == self.at:
            raise KeyError("the process ends here")
        super()._save_last_checkpoint(trainer, candidates)


def run_with_last(folder: Path, at: int = 0, ckpt_path: str = "", **kept: Any) -> Run:
    keeping = {"dirpath": folder, "every_n_train_steps": 1, "filename": "{step}", "save_last": True, **kept}
    run = replace(run_of(folder), callbacks=((DiesBeforeLast, {"at": at, **keeping}),))
    return until(replace(run, ckpt_path=str(folder / ckpt_path) if ckpt_path else None), 5)


@pytest.mark.parametrize(
    "kept",
    [
        NEWEST,
        pytest.param({"save_top_k": 1, "monitor": "falling"}, marks=pytest.mark.slow),
        pytest.param({"save_top_k": -1}, marks=pytest.mark.slow),
    ],
)
def test_what_the_last_checkpoint_does_not_know_of_is_written_again(
    pools: Pools, tmp_path: Path, kept: dict[str, Any]
) -> None:
    """Interrupted twice between two checkpoints of one step; a run that goes on has the undisturbed one's files."""
    for ckpt_path in ("", "last.ckpt"):
        outcomes = pools.outcomes(2, fit, run_with_last(tmp_path, 4, ckpt_path, **kept))
        assert outcomes[0].error == "KeyError"
    assert (tmp_path / "step=4.ckpt").exists()
    pools.run(2, fit, run_with_last(tmp_path, 0, "last.ckpt", **kept))
    undisturbed = tmp_path / "undisturbed"
    pools.run(2, fit, run_with_last(undisturbed, **kept))
    assert names(tmp_path) - {"undisturbed"} == names(undisturbed)


@pytest.mark.parametrize("ckpt_path", [pytest.param("", marks=pytest.mark.slow), "step=2.ckpt"])
def test_another_branch_of_the_run_keeps_its_checkpoints(pools: Pools, tmp_path: Path, ckpt_path: str) -> None:
    """One that begins anew, or goes on from an earlier checkpoint than the last one."""
    pools.run(2, fit, run_with_last(tmp_path, save_top_k=-1))
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name.startswith("step=")}
    pools.run(2, fit, run_with_last(tmp_path, 0, ckpt_path, save_top_k=-1))
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert "step=5-v1.ckpt" in names(tmp_path)
