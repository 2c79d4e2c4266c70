"""Messages over gloo that can be asked whether they are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline.ranks.process_groups import HostWork


@pytest.fixture(scope="module")
def pair() -> list[Any]:
    """Both ends of a connection, in one process."""
    store, groups = dist.HashStore(), [None, None]

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=2))  # type: ignore[call-overload]

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_both_sides_are_done_without_anybody_waiting(pair: list[Any]) -> None:
    sent, room = torch.arange(300_000.0), torch.zeros(300_000)
    receive = HostWork(pair[1].recv([room], 0, 5))
    assert not receive.is_completed()
    send = HostWork(pair[0].send([sent], 1, 5))
    assert until(receive.is_completed)
    assert until(send.is_completed)
    assert torch.equal(room, sent)
    receive.wait()
    send.wait()


def test_what_goes_wrong_is_raised_for_whoever_waits(pair: list[Any]) -> None:
    work = HostWork(pair[1].recv([torch.zeros(1)], 0, 6))  # nobody sends: it ends with the group's timeout
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        work.wait()
    assert work.is_completed()
