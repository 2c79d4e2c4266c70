"""An outbox sends a tensor only when it is taken; a rank that fails says why, and no rank waits for ever."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.wire import handover
from lightning_asyncpp.core.wire.handover import Inbox, Outbox, Way
from lightning_asyncpp.core.wire.link import NO_TIMEOUT, Link, TensorInfo
from lightning_asyncpp.errors import PeerLostError, ProtocolError
from lightning_asyncpp.tools.plan.fake_tensors import FakeTensorMode

SECONDS = 5.0


class Wire:
    """Fake ``Way`` for both ends in one process: what is sent at one end can be received at the other."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.fails: Exception | None = None
        self.threads: list[threading.Thread] = []
        self.freed_by: list[threading.Thread] = []

    def enter(self) -> None:
        self.threads.append(threading.current_thread())

    def record_event(self) -> None:
        return None

    def send(self, tensor: Tensor, ready: object) -> Mock:
        if self.fails is not None:
            raise self.fails
        self.sent.append(tensor)
        weakref.finalize(tensor, lambda: self.freed_by.append(threading.current_thread()))
        return Mock()

    def allocate(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        return [torch.empty(info.shape, dtype=info.dtype) for info in infos]

    def receive(self, info: TensorInfo, tensor: Tensor) -> None:
        assert len(self.sent) == 1, "launched before the other side launched its send, or twice"
        tensor.copy_(self.sent.pop())


class Ends(NamedTuple):
    wire: Wire
    outbox: Outbox
    inbox: Inbox


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    wire: Any = Wire()
    ends = Ends(wire, Outbox(wire, Link(ours, "rank 1", NO_TIMEOUT)), Inbox(wire, Link(theirs, "rank 2", SECONDS)))
    yield ends
    ends.outbox.close()
    ends.inbox.close()


def infos(*tensors: Tensor) -> list[TensorInfo]:
    return [TensorInfo.of(tensor) for tensor in tensors]


def test_no_tensor_is_launched_before_it_is_taken(ends: Ends) -> None:
    """A microbatch's second tensor is not launched with the first either: see the assertion in ``receive``."""
    tensors = [(torch.full((2,), float(k)), torch.tensor([k])) for k in range(3)]
    for pair in tensors:
        ends.outbox.put(pair)
    time.sleep(0.05)
    assert not ends.wire.sent
    for pair in tensors:
        assert all(map(torch.equal, ends.inbox.take(infos(*pair)), pair))
    ends.outbox.settle()


def test_the_thread_works_on_the_device_and_frees_nothing(ends: Ends) -> None:
    """The thread must not free tensors: it would wait for the allocator, which may wait for the thread's answer."""
    for _ in range(3):
        ends.outbox.put([torch.ones(1)])
        ends.inbox.take(infos(torch.ones(1)))
    ends.outbox.settle()
    (thread,) = ends.wire.threads
    assert thread is not threading.main_thread()
    assert ends.wire.freed_by == [threading.main_thread()] * 3


def test_a_receive_is_launched_behind_what_was_computed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the receive would run, and spin, beside that computation."""
    launched: list[object] = []
    messages = Mock(wait_stream=launched.append)
    computing = Mock()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    monkeypatch.setattr(handover, "dist", Mock(irecv=lambda *_, **__: launched.append("receive") or Mock()))
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    way = Way(1, None, torch.device("cpu"), messages)  # type: ignore[arg-type]
    way.receive(TensorInfo.of(torch.ones(2)), torch.ones(2))
    assert launched == [computing, "receive"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.complex64])
def test_what_is_received_lies_on_the_device_as_it_did(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A received tensor has the sent one's device and strides; fake tensors without memory emulate a GPU."""
    device = torch.device("cuda", 0)

    def launch(tensor: Tensor, peer: int, group: object) -> Mock:
        assert tensor.device == device
        return Mock()

    monkeypatch.setattr(handover, "dist", Mock(isend=launch, irecv=launch))
    way = Way(1, None, device, None)  # type: ignore[arg-type]
    with FakeTensorMode():
        sent = torch.zeros(2, 3, 4, dtype=dtype, device=device).permute(1, 2, 0)
        info = TensorInfo.of(sent)
        way.send(info.stored(sent).contiguous(), None)
        (received,) = way.allocate([info])
        way.receive(info, received)
        assert (received.shape, received.dtype, received.device) == (sent.shape, dtype, device)
        assert received.stride() == sent.stride()


def test_a_limit_holds_until_somebody_takes(ends: Ends) -> None:
    for _ in range(3):
        ends.outbox.put([torch.ones(1)])
    waited = threading.Thread(target=ends.outbox.wait_until_taken, args=(2,))
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    ends.inbox.take(infos(torch.ones(1)))
    waited.join(SECONDS)
    assert not waited.is_alive()


def test_a_tensor_that_was_not_put_out_ends_both_sides(ends: Ends) -> None:
    with pytest.raises(PeerLostError):
        ends.inbox.take(infos(torch.ones(1)))
    with pytest.raises(ProtocolError, match="rank 1 asked for tensors that were not offered: \\(1, 0, 0\\)"):
        ends.outbox.put([torch.ones(1)])


def test_a_send_that_fails_is_the_first_cause_where_it_failed(ends: Ends) -> None:
    ends.outbox.put([torch.ones(1)])
    ends.wire.fails = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(PeerLostError):
        ends.inbox.take(infos(torch.ones(1)))
    with pytest.raises(RuntimeError, match="sending to rank 1 failed: CUDA error: an illegal memory access"):
        ends.outbox.wait_until_taken()


def test_who_is_gone_is_lost_to_both_sides(ends: Ends) -> None:
    ends.outbox.put([torch.ones(1)])
    ends.inbox.close()
    with pytest.raises(PeerLostError):
        ends.outbox.wait_until_taken()
