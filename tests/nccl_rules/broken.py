"""Plausible ways to send tensors between devices that break the rule of the handover, and therefore hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.wire import handover
from lightning_asyncpp.core.wire.handover import Inbox, Outbox, Way
from lightning_asyncpp.core.wire.link import Header, TensorInfo
from lightning_asyncpp.core.wire.transport import Transport
from tests.nccl_rules import emulated

SECONDS = 1.5


def send_at_once(rank: int) -> Callable[[], None]:
    """Launch sends where tensors are made, and receives when tensors are announced: no receive is early.

    Two neighbours wait for ever if both wait for their devices, each with a send in flight.
    """
    return _without_handover(rank, share_of_waits=0.3)


def receive_early(rank: int) -> Callable[[], None]:
    """Launch the receive of a gradient with the send of the activation, long before the gradient is made."""
    check = _without_handover(rank, share_of_waits=0.1)
    send_forward, recv_backward = Transport.send_forward, Transport.recv_backward
    posted: dict[int, list[Tensor]] = {}
    works: dict[int, list[dist.Work]] = {}

    def send_and_expect(self: Transport, header: Header, tensors: tuple[Tensor, ...]) -> None:
        infos = [info for info in header.layout.tensors if info.needs_gradient]
        if self._direct is not None and infos:
            way = self._direct.from_next._way
            posted[header.k] = [info.empty(self.device) for info in infos]
            receives = [handover.dist.irecv(tensor, way.peer, group=way.group) for tensor in posted[header.k]]
            works[header.k] = receives  # type: ignore[assignment]
        send_forward(self, header, tensors)

    def receive_expected(self: Transport, k: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        if k not in posted:
            return recv_backward(self, k, outputs)
        self._next_frame(self._next, 2)  # type: ignore[arg-type]
        for work in works.pop(k):
            work.wait()
        return posted.pop(k)

    Transport.send_forward = send_and_expect  # type: ignore[method-assign]
    Transport.recv_backward = receive_expected  # type: ignore[method-assign]
    return check


def allocate_late(rank: int) -> Callable[[], None]:
    """Allocate the memory for a tensor after the neighbour has launched its send; the allocator may wait then."""
    emulated.HANG_SECONDS = SECONDS
    check = emulated.emulate(rank, share_of_waits=0.5)
    allocate, receive = Way.allocate, Way.receive

    def receive_into_new(self: Way, info: TensorInfo, given: Tensor) -> None:
        given.set_(*allocate(self, [info]))
        receive(self, info, given)

    Way.allocate = lambda self, infos: [torch.empty(0, dtype=info.dtype) for info in infos]  # type: ignore[method-assign]
    Way.receive = receive_into_new  # type: ignore[method-assign]
    return check


def take_together(rank: int) -> Callable[[], None]:
    """Have all tensors of a microbatch sent before the first is received: in one queue this hangs without any wait."""
    emulated.HANG_SECONDS = SECONDS
    Inbox.take = _take_together  # type: ignore[method-assign]
    return emulated.emulate(rank, share_of_waits=0.0, one_queue=True)


def _take_together(self: Inbox, infos: Sequence[TensorInfo]) -> list[Tensor]:
    tensors = self._way.allocate(infos)
    for _ in infos:
        self._link.write(handover._TAKE, self._taken, [])
        self._link.read_frame()
        self._taken += 1
    return _received(self._way, infos, tensors)


def _without_handover(rank: int, share_of_waits: float) -> Callable[[], None]:
    emulated.HANG_SECONDS = SECONDS
    check = emulated.emulate(rank, share_of_waits)
    Outbox.put = _put_at_once  # type: ignore[method-assign]
    Inbox.take = _take_unasked  # type: ignore[method-assign]
    return check


def _put_at_once(self: Outbox, tensors: Sequence[Tensor]) -> None:
    whole = [tensor.contiguous() for tensor in tensors]
    self._sends += [(self._way.send(tensor, self._way.record_event()), tensor) for tensor in whole]


def _take_unasked(self: Inbox, infos: Sequence[TensorInfo]) -> Any:
    return _received(self._way, infos, self._way.allocate(infos))


def _received(way: Way, infos: Sequence[TensorInfo], tensors: list[Tensor]) -> list[Tensor]:
    for info, tensor in zip(infos, tensors):
        way.receive(info, tensor)
    return tensors
