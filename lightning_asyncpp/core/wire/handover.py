"""Transfer of tensors from GPU to GPU over NCCL, such that a wait for a whole device cannot hang.

A message of NCCL is two kernels, and each lies on its stream until the other one runs. Whatever waits for the whole
device (``torch.cuda.synchronize()``, ``empty_cache()``, the allocator near the limit, the end of a profile) waits for
such a kernel, too; so does whatever shares its hardware queue. If its host waits there while the counterpart is still
to be launched by a host that waits likewise, nobody goes on. Hence the rule: **neither kernel is launched before both
hosts are launching theirs**, and nothing between the two may wait for a device, not even for memory.

    sender, where it is computed          receiver, where it is used
        put() ................................  take(): allocates, asks, and waits for the answer alone
        a thread launches the send, answers ..  launches the receive

The thread answers at once, whatever its process waits for; so the receiver's host loses a round trip, and its device
nothing as long as it has work. Each side launches from a stream of its own: a send waits for its tensor, and not for
what is being computed now; a receive, for all that was launched before it.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core import background
from lightning_asyncpp.core.ranks.mesh import Groups, Mesh, started
from lightning_asyncpp.core.wire.connect import connect_neighbours
from lightning_asyncpp.core.wire.link import NO_TIMEOUT, Link, TensorInfo, memory_of, written_out
from lightning_asyncpp.errors import PeerLostError, ProtocolError, is_noise, peer_lost

_TAKE, _SENT = 1, 2


class Way(NamedTuple):
    """One direction between two neighbours.

    Attributes:
        peer: rank of the other side.
        group: of the two; the other direction has its own.
        device: of this rank.
        stream: from which messages are launched; None where the device has none.
    """

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def to(cls, peer: int, group: dist.ProcessGroup | None, device: torch.device) -> Way:
        """That to a rank, or from it."""
        assert group is not None
        # Of high priority, from a pool that others do not take from: torch gives the same streams out again and again.
        return cls(peer, group, device, torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None)

    def enter(self) -> None:
        """Let what this thread does be on the device: a thread begins on the first one, and would open it, too."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def launching(self) -> AbstractContextManager[object]:
        """Return a context in which launches do not wait for earlier work of this thread."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """A moment of what is computed here, for which a message can wait."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def send(self, tensors: Sequence[Tensor], ready: torch.cuda.Event | None) -> list[dist.Work]:
        """Launch a send of each, for the moment when they are ready."""
        with self.launching():
            if self.stream is not None and ready is not None:
                self.stream.wait_event(ready)
            # As bytes, which NCCL knows: it has no int16, for one.
            return [started(dist.isend(memory_of(tensor), self.peer, group=self.group)) for tensor in tensors]

    def allocate(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Memory to receive into; the host may have to wait for its whole device to get it."""
        with self.launching():  # this stream's memory, which nothing that is being computed may still read
            return [info.empty(self.device) for info in infos]

    def receive(self, infos: Sequence[TensorInfo], tensors: list[Tensor]) -> list[Tensor]:
        """Launch receives into tensors, behind what this device has to compute before it needs them.

        A receive that has started takes part of the device from what is computed beside it, until its tensor is there;
        and hosts are far ahead. What is computed from now on waits for it, the host does not.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.launching():
            stored = [memory_of(info.stored(tensor)) for info, tensor in zip(infos, tensors)]
            works = [started(dist.irecv(tensor, self.peer, group=self.group)) for tensor in stored]
        for work in works:
            work.wait()
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensors


class _Put(NamedTuple):
    """Tensor in an outbox."""

    tensors: list[Tensor]
    ready: torch.cuda.Event | None


class Outbox:
    """Queue of the tensors of one direction, from which the neighbour takes them in order.

    Args:
        way: to the neighbour.
        link: on which it asks for them; a wait in it must not end by itself.
    """

    def __init__(self, way: Way, link: Link) -> None:
        self._way, self._link = way, link
        self._changed = threading.Condition()
        self._waiting: deque[_Put] = deque()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()  # what is sent must live until it is done
        self._error: BaseException | None = None
        self._closed = False
        background.run(self._serve, "outbox")
        atexit.register(self.close)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Let the neighbour take tensors; it has to be told that they are there.

        Raises:
            PeerLostError: it is gone.
            RuntimeError: a send failed.
        """
        put = _Put([written_out(tensor) for tensor in tensors], self._way.mark())
        with self._changed:
            self._raise_error()
            while self._sends and self._sends[0][0].is_completed():
                self._sends.popleft()
            if put.tensors:
                self._waiting.append(put)

    def wait_until_taken(self, limit: int = 0) -> None:
        """Wait until no more than ``limit`` messages are still to be taken; raises as :meth:`put` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._closed or len(self._waiting) <= limit)
            self._raise_error()

    def settle(self) -> None:
        """Wait until everything is taken, and let go of it when it has been sent."""
        self.wait_until_taken()
        while self._sends:
            self._sends.popleft()[0].wait()

    def close(self) -> None:
        """End the connection: nobody takes anything any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._link.hang_up()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        try:
            self._way.enter()
            for number in itertools.count():
                self._hand_over(number)
        except BaseException as error:  # raised for whoever puts or waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._link.hang_up()  # the other side may be waiting for an answer
        if self._closed:
            self._link.close()

    def _hand_over(self, number: int) -> None:
        """Wait until the neighbour asks for the next message, and send it."""
        frame = self._link.read_frame()
        put = self._waiting[0] if self._waiting else None
        if frame != (_TAKE, number, 0) or put is None:
            raise ProtocolError(f"{self._link.peer} asked for tensors that were not put out: {tuple(frame)}")
        works = self._way.send(put.tensors, put.ready)
        self._link.write(_SENT, number, [])
        with self._changed:  # not before the answer is out: who waits for this may close the connection
            self._waiting.popleft()
            self._sends += zip(works, put.tensors)
            # Whoever puts lets go of them, not this thread: to free memory it would wait for the allocator, and with
            # Python's lock, while somebody who holds the allocator waits for what this thread has to answer.
            del works, put
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._closed:  # by this side, which needs nothing any more
            return
        if isinstance(self._error, (PeerLostError, ProtocolError)):
            raise type(self._error)(*self._error.args)
        if isinstance(self._error, Exception) and is_noise(self._error):
            raise peer_lost(self._link.peer, self._error)
        if self._error is not None:
            raise RuntimeError(f"sending to {self._link.peer} failed: {self._error}") from self._error


class Inbox:
    """Takes the tensors of one direction.

    Args:
        way: from the neighbour.
        link: to its outbox.
    """

    def __init__(self, way: Way, link: Link) -> None:
        self._way, self._link = way, link
        self._taken = 0

    def take(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Return the tensors that were put out next, and look so; the host does not wait for them.

        Raises:
            PeerLostError: the neighbour is gone, or failed to send.
            ProtocolError: it answered something else.
        """
        if not infos:
            return []
        # Before the send is launched: two hosts that each have a send under way, and wait for their devices while they
        # look for memory, would wait for ever.
        tensors = self._way.allocate(infos)
        self._link.write(_TAKE, self._taken, [])
        frame = self._link.read_frame()
        if frame != (_SENT, self._taken, 0):
            raise ProtocolError(f"{self._link.peer} did not send the tensors that were taken: {tuple(frame)}")
        self._taken += 1
        return self._way.receive(infos, tensors)

    def close(self) -> None:
        """End the connection."""
        self._link.hang_up()
        self._link.close()


class DeviceTensors:
    """Tensors of one stage with its two neighbours. Making one is a collective call.

    What comes, and that it can be taken, is known from headers and frames, which travel on their own.

    Args:
        mesh: this rank's place; its groups have one for each direction to each neighbour.
        device: where the tensors live.
        timeout: seconds that a wait for a neighbour may take; default: half an hour.

    Raises:
        ProtocolError: what a neighbour sent to try the way did not arrive.
    """

    def __init__(self, mesh: Mesh, device: torch.device, timeout: float | None = None) -> None:
        assert mesh.groups is not None
        groups: Groups = mesh.groups
        self.mesh, self.device = mesh, device
        activations = connect_neighbours(mesh, before=timeout, after=NO_TIMEOUT)
        gradients = connect_neighbours(mesh, before=NO_TIMEOUT, after=timeout)
        self._to_next = self._from_next = self._to_before = self._from_before = None
        ways: list[tuple[Way, Way] | None] = [None, None]  # there and back: to the stage before, to the stage after
        if activations.before is not None and gradients.before is not None:
            peer = mesh.rank_of(mesh.stage - 1)
            back, there = Way.to(peer, groups.backward, device), Way.to(peer, groups.forward, device)
            self._to_before, self._from_before = Outbox(back, gradients.before), Inbox(there, activations.before)
            ways[0] = back, there
        if activations.after is not None and gradients.after is not None:
            peer = mesh.rank_of(mesh.stage + 1)
            there, back = Way.to(peer, groups.to_next, device), Way.to(peer, groups.from_next, device)
            self._to_next, self._from_next = Outbox(there, activations.after), Inbox(back, gradients.after)
            ways[1] = there, back
        self._try(*ways)

    @classmethod
    def between(cls, mesh: Mesh, device: torch.device, timeout: float | None = None) -> DeviceTensors | None:
        """Such a transport where it can be used: where there are groups between neighbours."""
        groups = mesh.groups
        if groups is None or (groups.forward is None and groups.to_next is None):
            return None
        return cls(mesh, device, timeout)

    def put_activation(self, tensors: Sequence[Tensor]) -> None:
        """Let the stage after take tensors; to be announced when this has returned."""
        assert self._to_next is not None, "nothing comes after the last stage"
        self._to_next.put(tensors)

    def take_activation(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Take tensors of the stage before, which has announced them."""
        assert self._from_before is not None, "nothing comes before the first stage"
        return self._from_before.take(infos)

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Let the stage before take gradients; to be announced when this has returned."""
        assert self._to_before is not None, "nothing comes before the first stage"
        self._to_before.put(gradients)

    def take_gradients(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Take gradients of the stage after, which has announced them."""
        assert self._from_next is not None, "nothing comes after the last stage"
        return self._from_next.take(infos)

    def wait_for_stage_after(self, limit: int) -> None:
        """Wait until the stage after has taken all but ``limit`` activations."""
        if self._to_next is not None:
            self._to_next.wait_until_taken(limit)

    def settle(self) -> None:
        """Wait until everything is taken, and let go of it when it has been sent."""
        for outbox in (self._to_before, self._to_next):
            if outbox is not None:
                outbox.settle()

    def close(self) -> None:
        """End the connections, from any thread: nobody takes anything any more."""
        for end in self._ends():
            end.close()

    def _ends(self) -> Iterator[Outbox | Inbox]:
        for end in (self._to_before, self._to_next, self._from_before, self._from_next):
            if end is not None:
                yield end

    def _try(self, before: tuple[Way, Way] | None, after: tuple[Way, Way] | None) -> None:
        """Send a number each way: NCCL connects two ranks at their first message, and their hosts wait for each other.

        First the pairs that begin with an even stage, then the others: so everybody has one partner at a time.
        """
        stage = self.mesh.stage
        number = torch.full((1,), stage, device=self.device, dtype=torch.float32)
        for parity in (0, 1):
            begins = stage % 2 == parity
            if (ways := after if begins else before) is None:
                continue
            there, back = ways
            sends = there.send([number], there.mark()) if begins else []
            infos = [TensorInfo.of(number)]
            (heard,) = back.receive(infos, back.allocate(infos))
            sends += [] if begins else there.send([number], there.mark())
            for work in sends:
                work.wait()
            peer = stage + 1 if begins else stage - 1
            if (said := heard.item()) != peer:
                raise ProtocolError(f"{self.mesh.name_of(peer)} sent {peer} between the devices, and {said} arrived")
