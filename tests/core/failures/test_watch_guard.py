"""Real processes that watch over each other: who is missed, who is not, and what a failing rank's error says."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lightning_asyncpp.core.failures import guard
from lightning_asyncpp.core.failures.cause import Cause
from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.core.alone import run_script
from tests.core.failures import watched
from tests.core.failures.failing_cases import Outcome, run_ranks

RANKS = 3  # rank 2 is the first stage, rank 0 the last


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), [outcome.text for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


def others(outcomes: list[Outcome], killed: int) -> list[Outcome]:
    """How the others ended than a rank that was killed."""
    assert outcomes.pop(killed).error == "killed"
    assert [outcome.error for outcome in outcomes] == ["PeerLostError"] * len(outcomes)
    return outcomes


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_missed_at_once(rank: int) -> None:
    outcomes = run_ranks(watched.killed, RANKS, rank)
    text = f"rank {rank} (stage {RANKS - 1 - rank}) is gone: its process ended without an error of its own"
    for told in others(outcomes, rank):
        assert told.text == f"{text} (killed, crashed, or out of memory?)"
        assert told.seconds < 20.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a stopped process cannot be found")
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_missed_after_the_limit_and_killed(rank: int) -> None:
    outcomes = run_ranks(watched.stopped, RANKS, rank)
    text = f"rank {rank} (stage {RANKS - 1 - rank}) is gone: no sign of life for 4 s: it was stopped, or its machine"
    for told in others(outcomes, rank):
        assert told.text == f"{text} or the network is gone"
        assert watched.LIMIT < told.seconds < 20.0


def test_slow_ranks_and_one_that_has_ended_are_not_missed() -> None:
    assert values(run_ranks(watched.slow, RANKS)) == [[]] * RANKS


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_what_the_others_raise(rank: int) -> None:
    results = values(run_ranks(watched.error_of_one, RANKS, rank))
    line = f"rank {rank} (stage {RANKS - 1 - rank}) failed first: ValueError: the user's own mistake"
    texts = [text for text, _ in results]
    assert texts.pop(rank) == "the user's own mistake"
    assert [text.partition("\n")[0] for text in texts] == [line] * 2
    assert "\n" not in texts[-1]
    if rank != 0:
        assert "Traceback (most recent call last)" in texts[0], "users look at rank 0"
        assert texts[0].endswith("    ValueError: the user's own mistake")
    for told, is_gone in (lost for _, learnt in results for lost in learnt):
        assert told.startswith(line)
        assert not is_gone


def test_an_error_of_all_ranks_stays_as_it_is() -> None:
    assert values(run_ranks(watched.error_of_all, RANKS)) == ["lower it"] * RANKS


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads and files in /proc")
def test_nothing_is_left_of_a_watch_that_has_ended() -> None:
    for once, often in values(run_ranks(watched.again_and_again, 2)):
        assert often == once


HANGS = """
    import threading, time
    from lightning_asyncpp.core.ranks.mesh import Mesh
    from lightning_asyncpp.core.failures import guard
    from lightning_asyncpp.core.failures.cause import Cause
    from tests.core.failures.watched import Session

    class NobodyElse:
        stopped = cause = None
        start = end = lambda self: None

    guard._LEAST_LEAVE_SECONDS = 0.5
    guard.meet = lambda mesh, limit, learn: NobodyElse()
    mesh = Mesh(2, 1, 1, groups="connected")
    session = Session()
    watch = guard.Guard(0.5, session)
    watch.begin(mesh)
    cause = Cause(0, 1, "ValueError: the user's own mistake", "Traceback ...")
    threading.Thread(target=watch._learn, args=[cause]).start()

    def waits_for_what_never_comes():
        time.sleep(1000)

    {end}
"""


def test_a_script_that_has_its_error_is_not_ended_when_more_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch's thread may be later than the script's."""
    cause = Cause(0, 1, "ValueError: the user's own mistake", "Traceback ...")
    end = SimpleNamespace(
        cause=cause, stopped=None, start=lambda: None, end=lambda: None, wait_for_cause=lambda _: cause
    )
    monkeypatch.setattr(guard, "meet", lambda *_: end)
    monkeypatch.setattr(guard, "AtExit", lambda _: None)
    monkeypatch.setattr(guard, "last_word", MagicMock())
    session = watched.Session()
    watch = guard.Guard(60.0, session)
    watch.is_torn_down = True
    watch.begin(Mesh(2, 1, 1, groups="connected"))  # type: ignore[arg-type]
    watch.fail(ArithmeticError("own"))
    deadline = watch._deadline
    assert deadline is not None
    watch.release()
    watch._learn(cause)
    assert watch._deadline is deadline
    assert deadline.finished.is_set()


@pytest.mark.parametrize(
    ("end", "sign"),
    [
        ("waits_for_what_never_comes()", "in waits_for_what_never_comes"),
        pytest.param("time.sleep(0.2)", "asyncpp: rank 0 (stage 1) failed first", marks=pytest.mark.slow),
    ],
    ids=["hangs", "ends well"],
)
def test_a_rank_that_does_not_end_by_itself_or_ends_well_ends_with_the_cause(end: str, sign: str) -> None:
    done = run_script(HANGS.format(end=end))
    assert done.returncode == 1
    assert sign in done.stderr
    assert done.stderr.endswith("rank 0 (stage 1) failed first: ValueError: the user's own mistake\n")
