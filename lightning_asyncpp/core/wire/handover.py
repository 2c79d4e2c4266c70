"""Transfer of tensors between GPUs over NCCL, such that a wait for a whole device cannot hang.

An NCCL message consists of two kernels, one on each device. Each kernel occupies its stream until the other kernel
runs. A wait for a whole device (``torch.cuda.synchronize()``, ``empty_cache()``, the allocator near its limit, the end
of a profile) waits for such a kernel, too, and so does work in the same hardware queue. Two hosts deadlock if both wait
like this while each still has to launch the counterpart of a kernel on the other device. Hence the rule: **neither
kernel is launched before both hosts are about to launch theirs**, and between the two launches nothing may wait for a
device, not even for memory. Each tensor of a microbatch is a separate message.

    sender                                receiver
        put() ................................  take(): allocates memory, asks, and waits only for the answer
        a thread launches the send, answers ..  launches the receive

The thread answers at once, whatever its process waits for. So the receiver's host waits for one round trip per tensor,
and the receiver's device first completes all earlier work. Each side launches from a separate stream: a send waits for
its tensor, but not for later work on the compute stream. A receive waits for all work launched before it.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core import background
from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.core.wire.connect import connect_neighbours
from lightning_asyncpp.core.wire.link import NO_TIMEOUT, Link, TensorInfo, memory_of, written_out
from lightning_asyncpp.errors import PeerLostError, ProtocolError, is_noise, peer_lost

_TAKE, _SENT = 1, 2


class Way(NamedTuple):
    """One direction between two neighbours.

    Attributes:
        peer: rank of the neighbour.
        group: process group of the two ranks for this direction.
        device: device of this rank.
        stream: stream from which messages are launched; None on a CPU.
    """

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def to(cls, peer: int, group: dist.ProcessGroup | None, device: torch.device) -> Way:
        """Return a direction to or from a rank."""
        assert group is not None
        # torch hands out the same streams repeatedly. Few users take streams of high priority, so a stream of high
        # priority is less likely to be shared.
        return cls(peer, group, device, torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None)

    def enter(self) -> None:
        """Set this thread's device; by default the thread would use, and initialise, the first device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def launching(self) -> AbstractContextManager[object]:
        """Return a context in which launches do not wait for earlier work of this thread."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event on the compute stream that a message can wait for."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def send(self, tensor: Tensor, ready: torch.cuda.Event | None) -> dist.Work:
        """Launch a send of a tensor, after the event ``ready``."""
        with self.launching():
            if self.stream is not None and ready is not None:
                self.stream.wait_event(ready)
            # Sent as bytes, since NCCL lacks some dtypes, such as int16.
            return started(dist.isend(memory_of(tensor), self.peer, group=self.group))

    def allocate(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Return memory to receive into; the allocator may make the host wait for the whole device."""
        # The memory is from this stream's pool, so no kernel still running on another stream reads this memory.
        with self.launching():
            return [info.empty(self.device) for info in infos]

    def receive(self, info: TensorInfo, tensor: Tensor) -> None:
        """Launch a receive into a tensor, behind the work launched so far.

        Work launched later waits for the receive; the host does not wait. Hosts run far ahead of devices, and a
        receive occupies a part of the device until its tensor arrives, so it must not start earlier than needed.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.launching():
            work = started(dist.irecv(memory_of(info.stored(tensor)), self.peer, group=self.group))
        work.wait()
        if self.stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))


class _Put(NamedTuple):
    """Entry of an outbox: tensors, and the event after which they can be sent."""

    tensors: deque[Tensor]
    ready: torch.cuda.Event | None


class Outbox:
    """Queue of the tensors of one direction, from which the neighbour takes them in order.

    Args:
        way: direction to the neighbour.
        link: link on which the neighbour asks for tensors; without a timeout.
    """

    def __init__(self, way: Way, link: Link) -> None:
        self._way, self._link = way, link
        self._changed = threading.Condition()
        self._waiting: deque[_Put] = deque()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()  # keeps tensors alive until they are sent
        self._error: BaseException | None = None
        self._closed = False
        background.run(self._serve, "outbox")
        atexit.register(self.close)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors, which the neighbour can take once the caller has announced them.

        Raises:
            PeerLostError: the neighbour is gone.
            ProtocolError: the neighbour asked for other tensors.
            RuntimeError: a send failed.
        """
        put = _Put(deque(written_out(tensor) for tensor in tensors), self._way.record_event())
        with self._changed:
            self._raise_error()
            while self._sends and self._sends[0][0].is_completed():
                self._sends.popleft()
            if put.tensors:
                self._waiting.append(put)

    def wait_until_taken(self, limit: int = 0) -> None:
        """Wait until at most ``limit`` calls of :meth:`put` have untaken tensors; raises the errors of :meth:`put`."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._closed or len(self._waiting) <= limit)
            self._raise_error()

    def settle(self) -> None:
        """Wait until all tensors are taken and sent, and free them."""
        self.wait_until_taken()
        while self._sends:
            self._sends.popleft()[0].wait()

    def close(self) -> None:
        """End the connection; afterwards no tensors can be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._link.abort()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        try:
            self._way.enter()
            for number in itertools.count():
                self._hand_over(number)
        except BaseException as error:  # raised later, by put() and waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._link.abort()  # the other side may be waiting for an answer
        if self._closed:
            self._link.close()

    def _hand_over(self, number: int) -> None:
        """Wait until the neighbour asks for the next tensor, and send it."""
        frame = self._link.read_frame()
        put = self._waiting[0] if self._waiting else None
        if frame != (_TAKE, number, 0) or put is None:
            raise ProtocolError(f"{self._link.peer} asked for tensors that were not offered: {tuple(frame)}")
        work = self._way.send(put.tensors[0], put.ready)
        self._link.write(_SENT, number, [])
        # The answer is written first, since a thread that notify_all() wakes up may close the connection.
        with self._changed:
            self._sends.append((work, put.tensors.popleft()))
            if not put.tensors:
                self._waiting.popleft()
            # This thread must not free the tensors; put() does. To free a tensor, this thread would wait for the
            # allocator's lock while it holds the GIL, and the thread that holds the lock may be waiting for this
            # thread's next answer.
            del work, put
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._closed:  # this side has closed the connection
            return
        if isinstance(self._error, (PeerLostError, ProtocolError)):
            raise type(self._error)(*self._error.args)
        if isinstance(self._error, Exception) and is_noise(self._error):
            raise peer_lost(self._link.peer, self._error)
        if self._error is not None:
            raise RuntimeError(f"sending to {self._link.peer} failed: {self._error}") from self._error


class Inbox:
    """Receiver of the tensors of one direction.

    Args:
        way: direction from the neighbour.
        link: link to the neighbour's outbox.
    """

    def __init__(self, way: Way, link: Link) -> None:
        self._way, self._link = way, link
        self._taken = 0

    def take(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Return the next tensors, with the given shapes and dtypes; the host does not wait for their contents.

        Raises:
            PeerLostError: the neighbour is gone or failed to send.
            ProtocolError: the neighbour sent another answer.
        """
        # Memory is allocated before the neighbour launches the send: two hosts would deadlock if each had a send in
        # flight and, in order to get memory, waited for its device.
        tensors = self._way.allocate(infos)
        # Take one tensor at a time. A second send could not start before the first receive is launched; until then it
        # would block all other work in its hardware queue, perhaps on both sides.
        for info, tensor in zip(infos, tensors):
            self._link.write(_TAKE, self._taken, [])
            frame = self._link.read_frame()
            if frame != (_SENT, self._taken, 0):
                raise ProtocolError(f"{self._link.peer} did not send the tensor this rank asked for: {tuple(frame)}")
            self._taken += 1
            self._way.receive(info, tensor)
        return tensors

    def close(self) -> None:
        """Close the connection."""
        self._link.abort()
        self._link.close()


class DeviceTensors:
    """Transfer of tensors between one stage and its neighbours over NCCL; construction is a collective call.

    The caller announces and describes tensors by headers and frames, over other connections.

    Args:
        mesh: mesh of ranks with a group for each direction to each neighbour.
        device: device of the tensors.
        timeout: longest wait for a neighbour, in seconds; default: half an hour.

    Attributes:
        to_next: activations for the next stage; not set on the last stage.
        from_next: gradients from the next stage; not set on the last stage.
        to_prev: gradients for the previous stage; not set on the first stage.
        from_prev: activations from the previous stage; not set on the first stage.

    Raises:
        ProtocolError: a test message from a neighbour did not arrive as sent.
    """

    to_next: Outbox
    from_next: Inbox
    to_prev: Outbox
    from_prev: Inbox

    def __init__(self, mesh: Mesh, device: torch.device, timeout: float | None = None) -> None:
        assert mesh.groups is not None
        groups = mesh.groups
        self.mesh, self.device = mesh, device
        self._outboxes: list[Outbox] = []
        self._inboxes: list[Inbox] = []
        activations = connect_neighbours(mesh, prev_timeout=timeout, next_timeout=NO_TIMEOUT)
        gradients = connect_neighbours(mesh, prev_timeout=NO_TIMEOUT, next_timeout=timeout)
        ways: list[tuple[Way, Way] | None] = [None, None]  # (to, from) the previous and the next stage
        if activations.prev is not None and gradients.prev is not None:
            peer = mesh.rank_of(mesh.stage - 1)
            back, there = Way.to(peer, groups.to_prev, device), Way.to(peer, groups.from_prev, device)
            self.to_prev, self.from_prev = Outbox(back, gradients.prev), Inbox(there, activations.prev)
            self._outboxes.append(self.to_prev)
            self._inboxes.append(self.from_prev)
            ways[0] = back, there
        if activations.next is not None and gradients.next is not None:
            peer = mesh.rank_of(mesh.stage + 1)
            there, back = Way.to(peer, groups.to_next, device), Way.to(peer, groups.from_next, device)
            self.to_next, self.from_next = Outbox(there, activations.next), Inbox(back, gradients.next)
            self._outboxes.append(self.to_next)
            self._inboxes.append(self.from_next)
            ways[1] = there, back
        self._try(*ways)

    def settle(self) -> None:
        """Wait until all tensors are taken and sent, and free them."""
        for outbox in self._outboxes:
            outbox.settle()

    def close(self) -> None:
        """End the connections; may be called from any thread."""
        for outbox in self._outboxes:
            outbox.close()
        for inbox in self._inboxes:
            inbox.close()

    def _try(self, prev_ways: tuple[Way, Way] | None, next_ways: tuple[Way, Way] | None) -> None:
        """Exchange a number with both neighbours now, since NCCL's hosts wait for each other at the first message.

        Pairs that begin with an even stage come first, so that each rank has one partner at a time.
        """
        stage = self.mesh.stage
        number = torch.full((1,), stage, device=self.device, dtype=torch.float32)
        for parity in (0, 1):
            begins = stage % 2 == parity
            if (ways := next_ways if begins else prev_ways) is None:
                continue
            there, back = ways
            sends = [there.send(number, there.record_event())] if begins else []
            info = TensorInfo.of(number)
            (heard,) = back.allocate([info])
            back.receive(info, heard)
            sends += [] if begins else [there.send(number, there.record_event())]
            for work in sends:
                work.wait()
            peer = stage + 1 if begins else stage - 1
            if (received := heard.item()) != peer:
                who = self.mesh.name_of(self.mesh.rank_of(peer))
                raise ProtocolError(f"{who} sent {peer} from its device, but {received} arrived on this device")
