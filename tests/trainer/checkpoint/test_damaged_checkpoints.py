"""A byte that is not what was written: no run goes on from it, and no copy hides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_asyncpp.cli import main
from tests.storage.test_storage_damage import flip
from tests.trainer.checkpoint.test_crossed_checkpoints import (
    fabric_delayed,
    fabric_pipeline,
    trainer_delayed,
    trainer_pipeline,
)
from tests.trainer.checkpoint.test_resharding import SHARDED, run_of
from tests.trainer.pool import Pools
from tests.trainer.runs import fit


def damage(path: Path) -> Path:
    """Change a byte in the middle of the largest file, where tensors are."""
    file = max((part for part in (path, *path.rglob("*")) if part.is_file()), key=lambda part: part.stat().st_size)
    flip(file, file.stat().st_size // 2, 1)
    return file


@pytest.mark.parametrize(
    ("world", "run"),
    [(2, trainer_pipeline), (1, trainer_delayed), (2, fabric_pipeline), (1, fabric_delayed)],
)
def test_a_run_does_not_go_on(world: int, run: Callable[[str, bool], None], pools: Pools, tmp_path: Path) -> None:
    """On every rank, of which one compares a single file with its checksum."""
    pools.run(world, run, str(tmp_path / "run.ckpt"), True)
    file = damage(tmp_path / "run.ckpt")
    outcomes = pools.outcomes(world, run, str(tmp_path / "run.ckpt"), False)
    assert "StorageError" in [outcome.error for outcome in outcomes]
    for outcome in outcomes:
        assert f"{file} is damaged: its CRC-32 is" in outcome.message, outcome.message


def test_ranks_divide_the_files(pools: Pools, tmp_path: Path) -> None:
    """There are three in a checkpoint of two stages: the first rank reads the first and the third."""
    run = run_of(tmp_path, **SHARDED)
    pools.run(2, fit, run)
    file = damage(tmp_path / "step=4.ckpt")
    for stages in (1, 2, 3):
        again = replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=4.ckpt"))
        for outcome in pools.outcomes(stages, fit, again):
            assert f"{file} is damaged: its CRC-32 is" in outcome.message, outcome.message


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_copy_would_be_whole(form: str, pools: Pools, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pools.run(2, fit, run_of(tmp_path, **(SHARDED if form == "sharded" else {})))
    damage(tmp_path / "step=4.ckpt")
    for to in ("full", "sharded", "weights"):
        with pytest.raises(SystemExit) as end:
            main(["checkpoint", "convert", str(tmp_path / "step=4.ckpt"), str(tmp_path / to), "--to", to])
        assert end.value.code == 2
        assert "is damaged: its CRC-32 is" in capsys.readouterr().err
        assert not (tmp_path / to).exists()
