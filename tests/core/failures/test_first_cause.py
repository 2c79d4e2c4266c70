"""The first cause, as ranks write and read it: one counts, all learn it, and a lost store alone says nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from lightning_asyncpp.core import first_cause
from lightning_asyncpp.core.first_cause import MAX_LINE, MAX_TRACE, Cause, FirstCause
from lightning_asyncpp.errors import PeerLostError

SOON = 20.0  # on a machine that others use, too
MISTAKE = Cause("rank 2 (stage 0) failed first: ValueError: \ud800 \U0001f9df", "Traceback ...")
GONE = Cause("rank 1 (stage 1) is gone: it was killed")


class Lost:
    """A store whose server is gone."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise dist.DistNetworkError("failed to send")


class Rank:
    """What one rank learnt."""

    def __init__(self, key: str = "key") -> None:
        self.learnt: list[Cause] = []
        self.told = threading.Event()
        self.first = FirstCause(key, "rank 0 (stage 2)", self._learn)

    def _learn(self, cause: Cause) -> None:
        self.learnt.append(cause)
        self.told.set()


Made = Callable[..., list[Rank]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes three ranks on one store."""
    monkeypatch.setattr(first_cause, "POLL_SECONDS", 0.05)
    made: list[Rank] = []

    def make(store: object = None) -> list[Rank]:
        shared = dist.HashStore() if store is None else store
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)
        made.extend(Rank() for _ in range(3))
        return made

    yield make
    for rank in made:
        rank.first.stop()


@pytest.mark.parametrize("rank", range(3))
def test_what_a_rank_writes_all_learn(ranks: Made, rank: int) -> None:
    made = ranks()
    assert made[rank].first.report(MISTAKE, SOON) == MISTAKE
    assert all(other.told.wait(SOON) for other in made)
    assert [other.learnt for other in made] == [[MISTAKE]] * 3


def test_only_the_first_one_counts(ranks: Made) -> None:
    made = ranks()
    made[2].first.report(MISTAKE, SOON)
    assert [rank.first.report(GONE, SOON) for rank in made] == [MISTAKE] * 3
    assert all(other.told.wait(SOON) for other in made)
    assert [rank.learnt for rank in made] == [[MISTAKE]] * 3


def test_another_run_has_another_key(ranks: Made) -> None:
    made = ranks()
    made[0].first.report(MISTAKE, SOON)
    later = Rank("another key")
    assert not later.told.wait(0.3)
    later.first.stop()


def test_a_store_that_is_gone_is_no_failure_by_itself(ranks: Made) -> None:
    """Who serves it may have ended well; an error of this rank stays what it is."""
    made = ranks(Lost())
    assert made[0].first.wait(SOON) is None
    assert made[0].first.report(MISTAKE, SOON) == MISTAKE
    assert made[0].learnt == []


def test_a_store_and_a_peer_that_are_gone_are_rank_0(ranks: Made) -> None:
    made = ranks(Lost())
    assert made[1].first.report(GONE, SOON).line.startswith("rank 0 (stage 2) is gone: torch's store")


def test_nobody_waits_for_a_store_that_does_not_answer(ranks: Made) -> None:
    class Hangs(Lost):
        def check(self, keys: list[str]) -> bool:
            time.sleep(3.0)
            return False

    made = ranks(Hangs())
    start = time.monotonic()
    assert made[0].first.report(GONE, 0.2) == GONE
    assert time.monotonic() - start < 2.5


def test_who_has_stopped_learns_nothing(ranks: Made) -> None:
    made = ranks()
    made[1].first.stop()
    time.sleep(0.3)
    made[0].first.report(MISTAKE, SOON)
    assert not made[1].told.wait(0.3)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_is_told_with_its_place_and_a_lost_peer_as_it_is() -> None:
    cause = Cause.of(raised(ValueError("the user's\nown mistake")), "rank 1 (stage 0)")
    assert cause.line == "rank 1 (stage 0) failed first: ValueError: the user's own mistake"
    assert "in raised\n" in cause.text
    assert cause.text.startswith(f"{cause.line}\n\n    Traceback")
    gone = Cause.of(PeerLostError("rank 2 (stage 1) is gone: killed"), "rank 1 (stage 0)")
    assert gone == Cause("rank 2 (stage 1) is gone: killed")
    assert gone.text == gone.line


def test_what_is_told_is_not_endless() -> None:
    cause = Cause.of(raised(ValueError("much " * 100_000)), "rank 1 (stage 0)")
    assert len(cause.line) < MAX_LINE + 100
    assert len(cause.trace) <= MAX_TRACE + 4
