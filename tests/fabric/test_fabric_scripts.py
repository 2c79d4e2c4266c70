"""Scripts end on every rank: the example well, a failing one with an error and the first cause."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabric import failing_script
from tests.helpers.pool import Pools, impatient

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "fabric_gpt.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def run(*command: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would; a hang fails the test, and the process group goes with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["timeout", "-k", "5", str(timeout), *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    out, err = process.communicate()
    assert process.returncode not in (124, 137), f"it hung:\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_example(*arguments: str) -> str:
    """What the example prints in this process, which stands where torchrun would have started it."""
    argv = sys.argv
    sys.argv = [EXAMPLE, *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(EXAMPLE, run_name="__main__")
    finally:
        sys.argv = argv
    return printed.getvalue()


@pytest.mark.parametrize(
    "launcher", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("script", "torchrun"))]
)
def test_the_example_trains(pools: Pools, launcher: str) -> None:
    arguments = ("--devices", "2", "--steps", "21")
    if launcher:
        command = [sys.executable] if launcher == "script" else [*TORCHRUN, "2", "--standalone"]
        done = run(*command, EXAMPLE, *arguments)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        printed = "".join(pools.run(2, run_example, *arguments))
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(5.55, abs=0.1), "a uniform guess among 256 bytes"
    assert losses[0] > losses[1] > losses[2]
    assert float(re.findall(r"validation loss ([\d.]+)", printed)[0]) < 4.5


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "where"), [(2, "step"), (0, "step"), (1, "loop"), (2, "evaluation")])
def test_a_failure_on_one_rank_ends_all(stage: int, where: str) -> None:
    done = run(sys.executable, "-m", "tests.fabric.failing_script", str(stage), where)
    assert done.returncode != 0
    assert "ValueError: the user's own mistake" in done.stderr
    rank = 2 - stage
    last = f"rank {rank} (stage {stage}) failed first: ValueError: the user's own mistake"
    assert done.stderr.rstrip().splitlines()[-1].endswith(last), "below all that ranks have said"


def test_a_failure_on_one_rank_whose_process_lives_on_ends_all(pools: Pools) -> None:
    outcomes = pools.outcomes(3, impatient, failing_script.main, 2, "step", timeout=25.0)
    assert [outcome.error for outcome in outcomes] == ["ValueError", "PeerLostError", "PeerLostError"]
    line = "rank 0 (stage 2) failed first: ValueError: the user's own mistake"
    assert [outcome.message for outcome in outcomes[1:]] == [line] * 2
