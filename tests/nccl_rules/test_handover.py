"""What lies in an outbox leaves when it is taken, and not before; who fails says why, and nobody waits for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.pipeline.errors import PeerLostError, ProtocolError
from lightning_asyncpp.pipeline.handover import Inbox, Outbox, Way
from lightning_asyncpp.pipeline.header import TensorInfo
from lightning_asyncpp.pipeline.link import NO_TIMEOUT, Link

SECONDS = 5.0


class Done:
    """A message that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Wire:
    """A way of one process: what is launched at one end is there for the other."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.fails: Exception | None = None

    def mark(self) -> None:
        return None

    def send(self, tensors: Sequence[Tensor], ready: object) -> list[Done]:
        if self.fails is not None:
            raise self.fails
        self.sent += tensors
        return [Done() for _ in tensors]

    def allocate(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        return [torch.empty(info.shape, dtype=info.dtype) for info in infos]

    def receive(self, infos: Sequence[TensorInfo], tensors: list[Tensor]) -> list[Tensor]:
        assert len(self.sent) == len(infos), "launched before the other side launched its send, or twice"
        received, self.sent = self.sent, []
        return received


class Ends:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.wire = Wire()
        way = cast(Way, self.wire)
        self.outbox = Outbox(way, Link(ours, "rank 1", NO_TIMEOUT))
        self.link = Link(theirs, "rank 2", SECONDS)
        self.inbox = Inbox(way, self.link)

    def close(self) -> None:
        self.outbox.close()
        self.inbox.close()


@pytest.fixture
def ends() -> Any:
    ends = Ends()
    yield ends
    ends.close()


def infos(*tensors: Tensor) -> list[TensorInfo]:
    return [TensorInfo.of(tensor) for tensor in tensors]


def test_nothing_is_launched_before_it_is_taken_in_any_order(ends: Ends) -> None:
    tensors = [(torch.full((2,), float(k)), torch.tensor([k])) for k in range(3)]
    for k, pair in enumerate(tensors):
        ends.outbox.put(k, pair)
    time.sleep(0.05)
    assert not ends.wire.sent
    for k in (1, 0, 2):
        assert all(map(torch.equal, ends.inbox.take(k, infos(*tensors[k])), tensors[k]))
    ends.outbox.settle()


def test_what_is_empty_is_not_asked_for(ends: Ends) -> None:
    ends.outbox.put(0, [])
    assert ends.inbox.take(0, []) == []
    ends.outbox.settle()


def test_a_limit_holds_until_somebody_takes(ends: Ends) -> None:
    for k in range(3):
        ends.outbox.put(k, [torch.ones(1)])
    waited = threading.Thread(target=ends.outbox.wait_until_taken, args=(2,))
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    ends.inbox.take(0, infos(torch.ones(1)))
    waited.join(SECONDS)
    assert not waited.is_alive()


def test_a_tensor_that_was_not_put_out_ends_both_sides(ends: Ends) -> None:
    with pytest.raises(PeerLostError):
        ends.inbox.take(7, infos(torch.ones(1)))
    with pytest.raises(ProtocolError, match="rank 1 asked for tensors that were not put out: 1, 7"):
        ends.outbox.put(0, [torch.ones(1)])


def test_a_send_that_fails_is_the_first_cause_where_it_failed(ends: Ends) -> None:
    ends.outbox.put(0, [torch.ones(1)])
    ends.wire.fails = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(PeerLostError):
        ends.inbox.take(0, infos(torch.ones(1)))
    with pytest.raises(RuntimeError, match="sending to rank 1 failed: CUDA error: an illegal memory access"):
        ends.outbox.wait_until_taken()


def test_another_answer_is_refused(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    liar = Link(theirs, "rank 2", SECONDS)
    inbox = Inbox(cast(Way, ends.wire), Link(ours, "rank 3", SECONDS))
    liar.write(2, 5, [])
    with pytest.raises(ProtocolError, match="rank 3 did not send the tensors of micro-batch 4"):
        inbox.take(4, infos(torch.ones(1)))
    inbox.close()
    liar.close()


def test_who_is_gone_is_lost_to_both_sides(ends: Ends) -> None:
    ends.outbox.put(0, [torch.ones(1)])
    ends.inbox.close()
    with pytest.raises(PeerLostError):
        ends.outbox.wait_until_taken()


def test_after_the_end_nothing_is_waited_for(ends: Ends) -> None:
    ends.outbox.put(0, [torch.ones(1)])
    ends.inbox.close()
    ends.outbox.close()
    ends.outbox.settle()
