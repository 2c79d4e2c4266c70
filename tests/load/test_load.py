"""Long trainings hold no more at their end than at their start, and are as fast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.load.__main__ import run_alone
from tests.load.judge import count_problems, counts, judge
from tests.load.probe import Sample
from tests.load.runs import Load, trainer_under_load

SHORT = Load(200, every=10, epoch=100, validate=50, save=60, drain=40, options={"micro_batches": 2})
MIB = 2**20
ROOT = Path(__file__).parents[2]


def test_a_short_training_leaves_nothing_behind() -> None:
    ranks = run_alone(trainer_under_load, SHORT, 2, timeout=200.0)
    assert [len(samples) for samples in ranks] == [20, 20]
    found = counts([samples[10:] for samples in ranks])  # after each kind of thing has happened once
    assert not count_problems(found)
    assert all(last > 0 for _, last in found["threads"] + found["files"] + found["objects"])


def test_what_a_callback_leaves_behind_is_seen() -> None:
    leaking = replace(SHORT, steps=120, drain=10, kept=True)
    (samples,) = run_alone(trainer_under_load, leaking, 1, timeout=200.0)
    problems = count_problems(counts([samples[2:]]))
    assert {"threads", "python_threads", "files"} <= {problem.split()[2] for problem in problems}


def sampled(resident: Callable[[int], float], cpu: Callable[[int], float], steps: range) -> list[Sample]:
    """Samples of a process whose memory (MiB) and CPU time per step (ms) are known."""
    return [
        Sample(s, round(resident(s) * MIB), 9, 2, 40, 16_000 + s % 3, 100_000, 10**8, 0, 0.02, cpu(s) / 1e3, 1e-4)
        for s in steps
    ]


def test_growth_is_told_from_a_jump() -> None:
    every = range(50, 10_050, 50)
    jump, growth = lambda s: 500 + (3 if s > 6000 else 0), lambda s: 500 + 3 * s / 10_000
    steady = judge([sampled(jump, lambda s: 5.0, every)])
    leaking = judge([sampled(growth, lambda s: 5.0, every)])
    assert steady.problems() == []
    assert leaking.growth == [pytest.approx(3, rel=1e-3)]
    assert leaking.problems() == ["rank 0: memory grows by 3.00 MiB in 10,000 steps"]


@pytest.mark.parametrize(("slower", "problem"), [(1.02, False), (1.05, True)])
def test_laps_in_turns_are_compared_whatever_else_the_machine_does(slower: float, problem: bool) -> None:
    """It becomes twice as slow in the middle, for both of them."""
    pace = lambda lap: 5.0 * (2.0 if lap >= 10 else 1.0) * (1.01 if lap % 2 else 0.99)  # noqa: E731
    old = sampled(lambda s: 500, lambda s: slower * pace((s - 10_050) // 50), range(50, 11_050, 50))
    new = sampled(lambda s: 500, lambda s: pace((s - 350) // 50), range(50, 1350, 50))
    verdict = judge([old, old], [new, new], before=10_000)
    assert verdict.slower["CPU time"].median == pytest.approx(slower)
    assert verdict.slower["time"].median == pytest.approx(1)
    assert len(verdict.problems()) == problem


@pytest.mark.slow
@pytest.mark.timeout(5000)
@pytest.mark.parametrize(
    "arguments",
    [["--steps", "10000"], ["--steps", "2000", "--fabric", "--stages", "2", "--replicas", "2"]],
    ids=["Trainer", "Fabric"],
)
def test_a_long_training(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.load", *arguments, "--out", str(tmp_path), "--timeout", "4500"]
    done = subprocess.run(["timeout", "-k", "10", "4800", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
