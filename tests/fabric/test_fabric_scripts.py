"""Scripts end on every rank: the example without an error, and a failing script with an error and the first cause."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.helpers.cases import Case
from tests.helpers.fabric import Run
from tests.helpers.pool import Pools, elastic_environment, free_port, impatient
from tests.helpers.programs import run_ranks

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "fabric_gpt.py")


def run_example(*arguments: str) -> str:
    """Run the example in this process, as if torchrun had started it, and return its output."""
    with patch.object(sys, "argv", [EXAMPLE, *arguments]), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(EXAMPLE, run_name="__main__")
    return printed.getvalue()


def test_the_example_trains(pools: Pools) -> None:
    printed = "".join(pools.run(2, run_example, "--devices", "2", "--steps", "11"))
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(5.55, abs=0.1), "a uniform guess among 256 bytes"
    assert losses[0] > losses[1] + 0.1
    assert float(re.findall(r"validation loss ([\d.]+)", printed)[0]) < 5.3


def fail() -> None:
    """Train, and fail in an evaluation on the last stage only."""
    run = Run(Case(3, batch_sizes=(6,) * 15))

    def step(microbatch: dict[str, Tensor]) -> Tensor:
        if run.mesh.is_last:
            raise ValueError("the user's own mistake")
        return run.case.step(run.model)(microbatch)

    run.train(stop=10)
    run.strategy.evaluation_step(step, run.case.batch(10))
    run.train(start=10)
    run.strategy.drain()


def test_a_failure_on_one_rank_ends_all(pools: Pools) -> None:
    outcomes = pools.outcomes(3, impatient, fail, timeout=25.0)
    assert [outcome.error for outcome in outcomes] == ["ValueError", "PeerLostError", "PeerLostError"]
    line = "rank 0 (stage 2) failed first: ValueError: the user's own mistake"
    assert [outcome.message for outcome in outcomes[1:]] == [line] * 2


WITHOUT_CLOSE = """
import time
from tests.helpers.cases import Case
from tests.helpers.fabric import Run
Run(Case(3)).train()
print(time.time())
"""


def test_a_script_that_closes_nothing_ends_at_once(tmp_path: Path) -> None:
    port = free_port()
    ended = run_ranks(["-c", WITHOUT_CLOSE], tmp_path, [elastic_environment(rank, 2, port) for rank in range(2)])
    assert [end.returncode for end in ended] == [0, 0], ended
    assert time.time() - max(float(end.stdout) for end in ended) < 4  # a running thread would delay the end by 5 s
