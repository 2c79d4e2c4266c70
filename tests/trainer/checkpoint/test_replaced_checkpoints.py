"""A checkpoint that a run replaces while ranks resume from it, each of which opens it for itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.strategy_parts import checkpoint_io
from tests.trainer.checkpoint.test_crossed_checkpoints import (
    fabric_delayed,
    fabric_pipeline,
    trainer_delayed,
    trainer_pipeline,
)
from tests.trainer.pool import Pools

Way = Callable[[str, bool], None]


def late(way: Way, path: str, times: int) -> int:
    """Resume; the last rank finds another save each of the first ``times`` times. How often it was opened there."""
    opened, before = 0, checkpoint_io.open_checkpoint

    def open_checkpoint(name: Path) -> Any:
        nonlocal opened
        if os.environ["RANK"] == "0" or opened >= times:
            opened += 1
            return before(name)
        opened += 1
        return before(name.with_name("other.ckpt"))

    checkpoint_io.open_checkpoint = open_checkpoint  # type: ignore[assignment]
    try:
        way(path, False)
    finally:
        checkpoint_io.open_checkpoint = before
    return opened


@pytest.mark.parametrize(
    "way", [trainer_pipeline, fabric_pipeline, pytest.param(trainer_delayed, marks=pytest.mark.slow)]
)
def test_ranks_read_the_same_save(way: Way, pools: Pools, tmp_path: Path) -> None:
    pools.run(2, way, str(tmp_path / "run.ckpt"), True)
    pools.run(2, way, str(tmp_path / "other.ckpt"), True)
    with (tmp_path / "other.ckpt").open("ab") as file:  # of another size, whatever it holds
        file.write(b"\0")
    assert pools.run(2, late, way, str(tmp_path / "run.ckpt"), 2) == [3, 3]
    for outcome in pools.outcomes(2, late, way, str(tmp_path / "run.ckpt"), 99):
        assert "ranks read different saves of it; copy it, or name one that stays" in outcome.message, outcome.trace


@pytest.mark.parametrize("way", [trainer_delayed, fabric_delayed])
def test_a_process_alone_reads_what_it_compared(way: Way, pools: Pools, tmp_path: Path) -> None:
    pools.run(1, way, str(tmp_path / "run.ckpt"), True)
    assert pools.run(1, late, way, str(tmp_path / "run.ckpt"), 0) == [1]
