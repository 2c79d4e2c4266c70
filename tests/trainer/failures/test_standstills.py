"""Ranks that live, wait for nobody and do nothing: all end, each shows where it is, and what happened stands last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import Here, Job
from tests.faults.launch import Ended, launch
from tests.trainer.failures import standing

SOON = 45.0
STUCK = "time.sleep(self._seconds)"
SLEEPS = "time.sleep(NEVER)"


def run(train: Callable[[Here], dict[str, Any]], tmp_path: Path, processes: int = 2) -> Ended:
    return launch(Job(train.__name__, processes, train), tmp_path / "ranks", tmp_path / "checkpoints", limit=SOON)


def check(ended: Ended, said: str, line: str, waiting: tuple[int, ...] = ()) -> None:
    """All ranks failed; what happened stands last, and each has shown its stack with the line where it is."""
    assert ended.codes == [1] * len(ended.codes), ended.outputs()
    for rank in range(len(ended.codes)):
        assert said in ended.output(rank).rstrip().splitlines()[-1], ended.outputs()
        assert "it is here:" in ended.output(rank)
        if rank not in waiting:
            assert f"    {line}\n" in ended.output(rank), ended.outputs()


def ranks(count: int, without: tuple[int, ...] = ()) -> str:
    return ", ".join(f"rank {rank} (stage {count - 1 - rank})" for rank in range(count) if rank not in without)


NOBODY = f"no rank has made progress for {standing.SECONDS:g} s: "


@pytest.mark.slow
def test_loaders_that_all_hang(tmp_path: Path) -> None:
    ended = run(standing.in_loader, tmp_path)
    check(ended, f"asyncpp: {NOBODY}{ranks(2)}, waiting in the training loader ({standing.__file__}, line ", STUCK)


def test_a_stage_between_them_that_waits_is_not_blamed(tmp_path: Path) -> None:
    ended = run(standing.in_loader_of_three, tmp_path, 3)
    assert ended.codes == [1, 1, 1], ended.outputs()
    said = f"{NOBODY}{ranks(3, without=(1,))}, waiting in the training loader ({standing.__file__}, line "
    for rank in range(3):
        assert said in ended.output(rank), ended.outputs()
        assert "it is here:" in ended.output(rank)
    assert "PeerLostError: no rank has made progress" in ended.output(1)


@pytest.mark.parametrize(
    ("train", "where", "line"),
    [
        pytest.param(standing.in_validation, "waiting in an evaluation's loader", STUCK, marks=pytest.mark.slow),
        pytest.param(
            standing.in_first_batch_of_test, "waiting in an evaluation's loader", SLEEPS, marks=pytest.mark.slow
        ),
        pytest.param(standing.in_hook, "in stands_still", SLEEPS, marks=pytest.mark.slow),
        (standing.in_loader_of_fabric, "waiting in a loader", STUCK),
    ],
)
def test_other_places(train: Any, where: str, line: str, tmp_path: Path) -> None:
    check(run(train, tmp_path), f"asyncpp: {NOBODY}{ranks(2)}, {where} ({standing.__file__}, line ", line)


@pytest.mark.slow
def test_a_step_of_fabric(tmp_path: Path) -> None:
    """The first stage runs it up to the model: the last one waits for that."""
    ended = run(standing.in_step_of_fabric, tmp_path)
    assert ended.codes == [1, 1], ended.outputs()
    for rank in range(2):
        assert f"{NOBODY}rank 1 (stage 0), in stands_still ({standing.__file__}, line " in ended.output(rank)


@pytest.mark.slow
def test_a_loader_with_a_worker(tmp_path: Path) -> None:
    ended = run(standing.in_worker, tmp_path)
    assert ended.codes == [1, 1], ended.outputs()
    for rank in range(2):
        assert f"{NOBODY}{ranks(2)}, waiting in the training loader (" in ended.output(rank).splitlines()[-1]


@pytest.mark.slow
def test_where_nobody_watches_over_the_others_each_ends_by_itself(tmp_path: Path) -> None:
    ended = run(standing.in_loader_unwatched, tmp_path)
    assert ended.codes == [1, 1], ended.outputs()
    for rank in range(2):
        last = ended.output(rank).rstrip().splitlines()[-1]
        assert (
            f"no progress for {standing.SECONDS:g} s: rank {rank} (stage {1 - rank}), waiting in the training" in last
        )


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        (standing.slow, 12),
        pytest.param(standing.busy_around, 12, marks=pytest.mark.slow),
        pytest.param(standing.busy_fabric, 12, marks=pytest.mark.slow),
    ],
)
def test_who_makes_progress_or_owes_none_is_left_alone(train: Any, steps: int, tmp_path: Path) -> None:
    ended = run(train, tmp_path)
    assert [result["step"] for result in ended.results()] == [steps] * 2
    assert "made no progress" not in ended.outputs()
