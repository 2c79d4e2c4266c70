"""All ranks learn the first cause that a rank writes to the store; a lost store alone is not a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from lightning_asyncpp.core import first_cause
from lightning_asyncpp.core.first_cause import Cause, FirstCause
from lightning_asyncpp.errors import PeerLostError

SOON = 20.0  # generous, for a busy machine
MISTAKE = Cause("rank 2 (stage 0) failed first: ValueError: \ud800 \U0001f9df", "Traceback ...")
GONE = Cause("rank 1 (stage 1) is gone: it was killed")


class Lost:
    """Fake store whose server is gone; ``check`` fails only after ``hangs`` seconds."""

    def __init__(self, hangs: float = 0.0) -> None:
        self._hangs = hangs

    def check(self, keys: list[str]) -> bool:
        time.sleep(self._hangs)
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise dist.DistNetworkError("failed to send")


class Rank:
    """Rank that records the causes that it learns."""

    def __init__(self) -> None:
        self.learnt: list[Cause] = []
        self.told = threading.Event()
        self.first = FirstCause("key", "rank 0 (stage 2)", self._learn)

    def _learn(self, cause: Cause) -> None:
        self.learnt.append(cause)
        self.told.set()


Made = Callable[..., list[Rank]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Yield a function that makes three ranks on one store."""
    monkeypatch.setattr(first_cause, "POLL_SECONDS", 0.05)
    made: list[Rank] = []

    def make(store: object) -> list[Rank]:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        made.extend(Rank() for _ in range(3))
        return made

    yield make
    for rank in made:
        rank.first.stop()


def test_what_the_first_rank_writes_all_learn(ranks: Made) -> None:
    made = ranks(dist.HashStore())
    assert made[2].first.report(MISTAKE, SOON) == MISTAKE
    assert [rank.first.report(GONE, SOON) for rank in made] == [MISTAKE] * 3, "a later one does not count"
    assert all(other.told.wait(SOON) for other in made)
    assert [rank.learnt for rank in made] == [[MISTAKE]] * 3


def test_a_store_that_is_gone_is_no_failure_by_itself(ranks: Made) -> None:
    """Its server may have ended as planned: an error stays the cause, but beside a lost peer, rank 0 is blamed."""
    made = ranks(Lost())
    assert made[0].first.wait(SOON) is None
    assert made[0].first.report(MISTAKE, SOON) == MISTAKE
    assert made[0].learnt == []
    assert made[1].first.report(GONE, SOON).line.startswith("rank 0 (stage 2) is gone: torch's store")


def test_nobody_waits_for_a_store_that_does_not_answer(ranks: Made) -> None:
    made = ranks(Lost(hangs=3.0))
    start = time.monotonic()
    assert made[0].first.report(GONE, 0.2) == GONE
    assert time.monotonic() - start < 2.5


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_is_told_with_its_place_and_a_lost_peer_as_it_is() -> None:
    cause = Cause.of(raised(ValueError("the user's\nown mistake")), "rank 1 (stage 0)")
    assert cause.line == "rank 1 (stage 0) failed first: ValueError: the user's own mistake"
    assert "in raised\n" in cause.text
    gone = Cause.of(PeerLostError("rank 2 (stage 1) is gone: killed"), "rank 1 (stage 0)")
    assert gone.text == gone.line == "rank 2 (stage 1) is gone: killed"
