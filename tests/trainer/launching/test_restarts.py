"""torchrun brings a run back by itself, from its last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.oracle import assert_equal_weights, joined_parts, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import fit
from tests.trainer.failures.test_failures import ROOT, TORCHRUN
from tests.trainer.launching.restarted_script import run_in

SCRIPT = str(Path(__file__).with_name("restarted_script.py"))


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_restarts_from_the_last_checkpoint(pools: Pools, number: int, tmp_path: Path) -> None:
    """A killed rank loses what follows the last checkpoint, one that is told to end loses nothing."""
    torchrun = [*TORCHRUN[:-2], "--nproc-per-node=2", "--max-restarts=1"]
    command = ["timeout", "-k", "10", "250", *torchrun, SCRIPT, str(tmp_path), str(int(number))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    resumed_at = {signal.SIGKILL: (6,), signal.SIGTERM: (8, 9)}[signal.Signals(number)]
    started = [int(step) for step in (tmp_path / "started").read_text().split()]
    assert started[0] == 0
    assert started[1] in resumed_at
    parts = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    whole = pools.run(2, fit, run_in(tmp_path / "whole"))
    assert_equal_weights(joined_parts(parts), joined_weights(whole, 2))
