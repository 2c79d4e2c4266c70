"""In mid-epoch a loader without a state begins its epoch again, as under Lightning, and one warning says so."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import TWO_EPOCHS, fit_showing, run_of, saving_after, write_litdata
from tests.helpers.trainer import Run

MID_EPOCH, END, LAST = 3, 5, 10


def fit_warned(run: Run, kind: str, folder: str) -> dict[str, Any]:
    """Train, and report what was warned of, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit_showing(run, kind, folder)
    texts = [str(warning.message) for warning in caught]
    return found | {"warned": [text for text in texts if "not read as without the interruption" in text]}


def resumed(pools: Pools, folder: Path, kind: str, then: str, step: int, **changed: Any) -> list[Any]:
    """A run with one loader, resumed with another after a step, on all ranks."""
    run = saving_after(run_of(folder, kind, TWO_EPOCHS), step)
    pools.run(2, fit_showing, run, kind, "")
    again = replace(run, callbacks=(), ckpt_path=str(folder / f"step={step}.ckpt"), **changed)
    found: list[Any] = pools.run(2, fit_warned, again, then, "")
    return found


@pytest.mark.parametrize(
    ("kind", "then", "reason"),
    [
        ("plain", "plain", "a DataLoader cannot save its position"),
        ("stateful", "plain", "a DataLoader cannot save its position"),
        ("plain", "stateful", "with another loader, or another num_workers"),
        ("stateful", "stateful workers", "with another loader, or another num_workers"),
    ],
)
def test_in_mid_epoch(kind: str, then: str, reason: str, pools: Pools, tmp_path: Path) -> None:
    first, second = resumed(pools, tmp_path, kind, then, MID_EPOCH)
    (warning,) = first["warned"]
    assert "after batch 3 of an epoch" in warning
    assert reason in warning
    assert not second["warned"]
    assert first["steps"] == list(range(MID_EPOCH + 1, LAST + 1))


@pytest.mark.parametrize(("kind", "then"), [("plain", "plain"), ("stateful", "plain"), ("plain", "stateful")])
def test_at_an_epochs_end(kind: str, then: str, pools: Pools, tmp_path: Path) -> None:
    """Every loader is exact there; Lightning shuffles both alike."""
    whole = pools.run(2, fit_showing, replace(run_of(tmp_path, kind, TWO_EPOCHS), callbacks=()), kind, "")
    found = resumed(pools, tmp_path, kind, then, END)
    assert not found[0]["warned"]
    assert_equal_weights(joined_weights(found, 2), joined_weights(whole, 2))


def test_moved_data_is_the_same_data(pools: Pools, tmp_path: Path) -> None:
    """litdata compares paths, which say nothing of what lies there."""
    write_litdata(tmp_path / "data", 37)
    run = saving_after(run_of(tmp_path, "litdata", TWO_EPOCHS), MID_EPOCH)
    whole = pools.run(2, fit_showing, run, "litdata", str(tmp_path / "data"))
    moved = shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={MID_EPOCH}.ckpt"))
    found = pools.run(2, fit_warned, again, "litdata", str(moved))
    assert not found[0]["warned"]
    assert_equal_weights(joined_weights(found, 2), joined_weights(whole, 2))
