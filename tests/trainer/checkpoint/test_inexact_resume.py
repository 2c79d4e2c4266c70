"""In mid-epoch a loader without a state begins its epoch again, as under Lightning, and one warning says so."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.pool import Pools
from tests.helpers.resumable import TWO_EPOCHS, fit_showing, run_of, saving_after
from tests.helpers.trainer import Run


def fit_warned(run: Run, kind: str) -> tuple[list[str], list[int]]:
    """Train; what was warned of, and after which steps a batch ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = fit_showing(run, kind, "")["steps"]
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "not read as without the interruption" in text], steps


@pytest.mark.parametrize(
    ("kind", "then", "reason"),
    [
        ("plain", "plain", "a DataLoader cannot save its position"),
        ("stateful", "stateful workers", "with another loader, or another num_workers"),
    ],
)
def test_in_mid_epoch(kind: str, then: str, reason: str, pools: Pools, tmp_path: Path) -> None:
    run = saving_after(run_of(tmp_path, kind, TWO_EPOCHS), 3)
    pools.run(2, fit_showing, run, kind, "")
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=3.ckpt"))
    (first, steps), (second, _) = pools.run(2, fit_warned, again, then)
    (warning,) = first
    assert "after batch 3 of an epoch" in warning
    assert reason in warning
    assert not second
    assert steps == list(range(4, 11))
