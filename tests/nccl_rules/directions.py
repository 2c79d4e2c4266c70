"""The protocol of ``handover.py``, on simulated devices: how tensors go from one host to its neighbour.

A tensor lies in an outbox; the receiver, which knows so from a frame, allocates memory and asks for it; a thread at the
sender launches the send and answers; the receiver launches the receive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from tests.nccl_rules.devices import Clock, Device, Meeting, Operation, Queues, Signal, Thread

FRAME_TIME = 0.02  # of a message from host to host
HOST_TIMES = (0.001, 0.02, 0.5)  # between two things that a host does: far ahead of its device, or behind it

Waits: TypeAlias = Callable[[Random, int], bool]
"""Whether a host waits for its whole device, at a moment of microbatch k."""


class Process:
    """One rank: a device, and threads that launch on it."""

    def __init__(self, clock: Clock, queue_of: Queues, waits: Waits, slowdown: float) -> None:
        self.clock, self.device, self._waits = clock, Device(clock, queue_of, slowdown), waits
        self.step, self._locks = clock.random.choice(HOST_TIMES), clock.random.random() < 0.5
        self._wait: Signal | None = None  # the end of the one under way

    def moment(self, k: int) -> Thread:
        """Where this host may wait for its whole device."""
        yield self.step
        if self._waits(self.clock.random, k):
            self._wait = Signal(self.clock)
            yield from self.device.wait()
            self._wait.set()
            self._wait = None

    def may_launch(self) -> Thread:
        """In other threads of this process: wait while a wait of this host keeps them from it."""
        while self._locks and self._wait is not None:
            yield self._wait


class Link:
    """One way of a socket: what is written arrives, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._written: deque[tuple[str, int]] = deque()
        self._arrived: deque[tuple[str, int]] = deque()
        self._signal = Signal(clock)

    def write(self, kind: str, index: int) -> None:
        self._written.append((kind, index))
        self._clock.at(FRAME_TIME, self._arrive)

    def read(self) -> Thread:
        """Return the next frame, waiting for it."""
        while not self._arrived:
            self._signal = Signal(self._clock)
            yield self._signal
        return self._arrived.popleft()

    def _arrive(self) -> None:
        self._arrived.append(self._written.popleft())
        self._signal.set()


class Direction:
    """Tensors and frames from one host to a neighbour.

    Args:
        sender: whose outbox this is.
        receiver: who takes from it.
        leaves_on: the sender's stream.
        arrives_on: the receiver's stream.

    Attributes:
        sends_spin: whether a tensor is larger than NCCL's buffers: its send waits on the device for the receive.
    """

    sends_spin = False

    def __init__(self, sender: Process, receiver: Process, leaves_on: str, arrives_on: str) -> None:
        self.sender, self.receiver, self.leaves_on, self.arrives_on = sender, receiver, leaves_on, arrives_on
        clock = self.clock = sender.clock
        self.frames, self.asked, self.answered = Link(clock), Link(clock), Link(clock)
        self._outbox: dict[int, Operation] = {}  # microbatch -> what makes its tensor
        self._taken = Signal(clock)
        self._sends: list[Operation] = []
        self._meetings = defaultdict[int, Meeting](lambda: Meeting(clock, 2))
        clock.soon(self._serve())

    def put(self, k: int) -> Thread:
        """``Outbox.put``; nobody asks before the frame that follows it."""
        self._outbox[k] = self.sender.device.newest["compute"]
        yield from ()

    def take(self, k: int) -> Thread:
        """``Inbox.take``."""
        yield from self.receiver.moment(k)  # the allocator may wait when it looks for memory
        self.asked.write("take", k)
        yield from self.answered.read()
        yield from self.receive(k)

    def settle(self) -> Thread:
        """``Outbox.settle``."""
        while self._outbox:
            self._taken = Signal(self.clock)
            yield self._taken
        for send in self._sends:
            self.sender.device.launch("compute", send)
            yield self.sender.step
        self._sends = []

    def send(self, k: int, ready: Operation) -> Thread:
        """``Way.send``, from any thread."""
        yield from self.sender.may_launch()
        self.sender.device.launch(self.leaves_on, ready)
        yield self.sender.step
        yield from self.sender.may_launch()
        self._sends.append(self.sender.device.launch(self.leaves_on, meeting=self._meetings[k], spins=self.sends_spin))

    def receive(self, k: int) -> Thread:
        """``Way.receive``."""
        self.receiver.device.launch(self.arrives_on, self.receiver.device.newest.get("compute"))
        yield self.receiver.step
        receive = self.launch_receive(k)
        yield self.receiver.step
        self.receiver.device.launch("compute", receive)
        yield self.receiver.step

    def launch_receive(self, k: int) -> Operation:
        return self.receiver.device.launch(self.arrives_on, meeting=self._meetings[k], spins=True)

    def _serve(self) -> Thread:
        """``Outbox._serve``, in a thread of its own."""
        while True:
            _, k = yield from self.asked.read()
            yield from self.send(k, self._outbox.pop(k))
            self._taken.set()
            self.answered.write("sent", k)
