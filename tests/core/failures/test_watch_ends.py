"""Both ends of the watch, in one process: who is gone, who is not, and what all are told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from lightning_asyncpp.core.failures import heartbeat
from lightning_asyncpp.core.failures.cause import Cause
from lightning_asyncpp.core.failures.heartbeat import ENDED, End, Hub, Member
from lightning_asyncpp.core.failures.heartbeat_wire import Kind, Wire

LIMIT = 0.6
SOON = 10.0  # on a machine that others use, too
STAGES = [2, 1, 0]
MISTAKE = Cause(2, 0, "ValueError: the user's own mistake", "Traceback ...")


@dataclass
class Rank:
    """A rank's end, and what it learnt."""

    learnt: list[Cause] = field(default_factory=list)
    end: End | None = None

    def told(self, seconds: float = SOON) -> Cause | None:
        assert self.end is not None
        return self.end.wait_for_cause(seconds)


@contextmanager
def ranks(limit: float = LIMIT, wild: int | None = None) -> Iterator[tuple[list[Rank], socket.socket]]:
    """Three ranks that watch each other; one of them, if named, is nothing but the socket that is returned."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    made = [Rank() for _ in STAGES]
    with ExitStack() as closing:
        for rank, (_, there) in pairs.items():
            closing.callback(there.close)
            if rank != wild:
                made[rank].end = Member({0: Wire(there)}, STAGES, limit, made[rank].learnt.append)
        wires = {rank: Wire(here) for rank, (here, _) in pairs.items()}
        made[0].end = Hub(wires, STAGES, limit, made[0].learnt.append)
        for rank in made:
            if rank.end is not None:
                rank.end.start()
                closing.callback(rank.end.end)
        yield made, pairs[wild or 1][1]


def until(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_ranks_that_do_nothing_but_live_are_not_lost() -> None:
    with ranks() as (made, _):
        time.sleep(4 * LIMIT)
        assert [rank.told(0) for rank in made] == [None] * 3


@pytest.mark.parametrize("rank", range(3))
def test_an_error_is_told_to_all_other_ranks(rank: int) -> None:
    with ranks(60.0) as (made, _):
        reporter = made[rank].end
        assert reporter is not None
        reporter.report(MISTAKE)
        assert [other.told() for other in made] == [MISTAKE] * 3
        assert until(lambda: all(other.learnt == [MISTAKE] for other in made if other is not made[0] or rank != 0))


def test_only_the_first_error_counts() -> None:
    with ranks(60.0) as (made, _):
        made[2].end.report(MISTAKE)  # type: ignore[union-attr]
        assert made[1].told() == MISTAKE
        made[1].end.report(Cause(1, 1, "another", "one"))  # type: ignore[union-attr]
        made[0].end.report(Cause(0, 2, "a third", "one"))  # type: ignore[union-attr]
        assert until(lambda: all(rank.learnt for rank in made))
        time.sleep(0.1)
        assert [rank.learnt for rank in made] == [[MISTAKE]] * 3


def test_a_process_that_ends_is_noticed_at_once() -> None:
    with ranks(60.0, wild=2) as (made, wild):
        wild.close()
        assert [made[rank].told() for rank in (0, 1)] == [Cause(2, 0, ENDED)] * 2


def test_a_process_that_ends_after_it_has_said_why_is_not_gone() -> None:
    with ranks(60.0, wild=2) as (made, wild):
        Wire(wild).send(Kind.CAUSE, MISTAKE.pack())
        wild.close()
        assert [made[rank].told() for rank in (0, 1)] == [MISTAKE] * 2


def test_a_rank_that_says_nothing_is_lost_after_the_limit() -> None:
    start = time.monotonic()
    with ranks(wild=1) as (made, _):
        causes = [made[rank].told() for rank in (0, 2)]
        assert time.monotonic() - start > LIMIT
        why = f"no sign of life for {LIMIT} s: it was stopped, or its machine or the network is gone"
        assert causes == [Cause(1, 1, why)] * 2
        assert made[0].end.stopped is not None  # type: ignore[union-attr]


def test_half_a_message_is_no_sign_of_life() -> None:
    with ranks(wild=1) as (made, wild):
        for position in range(8):
            wild.sendall(b"life\x01\0\0\0\0"[position : position + 1])
            time.sleep(LIMIT / 6)
        cause = made[2].told()
        assert cause is not None
        assert cause.what.startswith("no sign of life")


def test_what_is_no_message_names_the_rank_that_it_came_from() -> None:
    with ranks(60.0, wild=1) as (made, wild):
        wild.sendall(b"GET / HTTP/1.1\r\n\r\n")
        cause = made[2].told()
        assert cause is not None
        assert cause.line.startswith("rank 1 (stage 1) is gone: its signs of life cannot be read: this is no sign")


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_rank_0_is_missed_by_all(how: str) -> None:
    here, there = socket.socketpair()
    learnt: list[Cause] = []
    member = Member({0: Wire(there)}, STAGES, LIMIT if how == "silent" else 60.0, learnt.append)
    member.start()
    if how == "gone":
        here.close()
    assert until(lambda: len(learnt) == 1)
    assert learnt[0].line.startswith("rank 0 (stage 2) is gone: " + (ENDED if how == "gone" else "no sign of life"))
    assert (member.stopped is not None) == (how == "silent")
    member.end()
    here.close()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rank_that_says_goodbye_is_not_missed(rank: int) -> None:
    with ranks() as (made, _):
        leaving = made[rank].end
        assert leaving is not None
        start = time.monotonic()
        leaving.end()
        assert time.monotonic() - start < 1.5, "it waited for a time-out"
        time.sleep(2 * LIMIT)
        assert [other.told(0) for other in made] == [None] * 3


def leaving(made: list[Rank], seconds: dict[int, float]) -> dict[int, bool]:
    """What ranks are answered that want to leave; each waits for so long."""
    ends_of = {rank: made[rank].end for rank in seconds}
    with ThreadPoolExecutor(len(seconds)) as pool:
        asked = {rank: pool.submit(end.leave, seconds[rank]) for rank, end in ends_of.items() if end is not None}
        return {rank: future.result() for rank, future in asked.items()}


def test_ranks_that_all_want_to_leave_may_and_nothing_is_wrong_after_that() -> None:
    with ranks(60.0) as (made, _):
        assert leaving(made, dict.fromkeys(range(3), SOON)) == dict.fromkeys(range(3), True)
        made[1].end.report(MISTAKE)  # type: ignore[union-attr]
        made[0].end.report(MISTAKE)  # type: ignore[union-attr]
        assert made[0].told(0.2) is None


def test_a_process_that_ends_after_all_wanted_to_leave_is_not_gone() -> None:
    with ranks(60.0, wild=2) as (made, wild):
        Wire(wild).send(Kind.LEAVE)
        assert leaving(made, {0: SOON, 1: SOON}) == {0: True, 1: True}
        wild.close()
        assert until(lambda: made[0].end._wires[2].fileno() == -1), "rank 0 listens to a closed connection"  # type: ignore[union-attr]
        assert [made[rank].told(0) for rank in (0, 1)] == [None] * 2


@pytest.mark.parametrize("rank", range(3))
def test_ranks_that_leave_others_behind_may_not(rank: int) -> None:
    with ranks(60.0) as (made, _):
        seconds = {other: 0.3 + SOON * (other != 0) for other in range(3) if other != rank}
        if rank == 0:
            seconds[1] = 0.3
            made[2].end.report(MISTAKE)  # type: ignore[union-attr]
        else:  # rank 0 has waited for long enough: it says so
            made[0].learnt.clear()
            threading.Timer(0.5, made[0].end.report, [MISTAKE]).start()  # type: ignore[union-attr]
        start = time.monotonic()
        assert leaving(made, seconds) == dict.fromkeys(seconds, False)
        assert time.monotonic() - start < SOON / 2


def test_who_was_told_too_late_is_not_counted() -> None:
    with ranks(60.0) as (made, _):
        assert leaving(made, {0: 0.1}) == {0: False}
        assert leaving(made, {1: 0.3, 2: 0.3}) == {1: False, 2: False}


def test_who_ends_while_nobody_answers_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_END_SECONDS", 0.2)
    with ranks(60.0, wild=1) as (made, _):
        made[0].end.end()  # type: ignore[union-attr]
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncpp-watch"]


def test_time_in_which_all_were_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z and ``fg``: every process finds that an hour has passed."""
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    clock = heartbeat._Clock()
    now[0] += 1.5
    clock.advance(2.0)
    assert clock.awake == 1.5
    now[0] += 3600.0
    clock.advance(2.0)
    assert clock.awake == 3.5
