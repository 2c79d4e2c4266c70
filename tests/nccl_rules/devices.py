"""A model of CUDA's devices: streams, hardware queues, and kernels that wait for each other.

What is launched on a stream runs in order. It goes through the hardware queue of its stream, which hands over in the
order of launching: its head, until what it waits for is done, blocks everything behind it, whatever the stream. A
kernel that has started blocks its queue no more, but its stream for as long as it runs. The kernels of a message, and
of an all-reduce, end together, once all of them have started. One that spins until then slows down what starts
beside it.

Threads of hosts are generators. How long anything takes is drawn around the time that is named.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeAlias, Union

TRANSFER_TIME = 0.1  # of a message from device to device

Thread: TypeAlias = Generator[Union[float, "Signal"], Any, Any]
"""It yields the time that something takes, or the signal that it waits for."""

Queues: TypeAlias = Callable[[str], str]
"""Stream -> its hardware queue."""


class Signal:
    """Something that happens once, and for which threads wait."""

    __slots__ = ("_clock", "is_set", "threads")

    def __init__(self, clock: Clock) -> None:
        self._clock, self.is_set = clock, False
        self.threads: list[Thread] = []

    def set(self) -> None:
        self.is_set = True
        for thread in self.threads:
            self._clock.soon(thread)
        self.threads = []


class Clock:
    """Runs threads, and what happens later; every time is drawn around the one that is named."""

    def __init__(self, seed: int) -> None:
        self.now, self.random = 0.0, Random(seed)
        self._soon: deque[Thread] = deque()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def at(self, delay: float, call: Callable[[], object]) -> None:
        heappush(self._later, (self.now + delay * (0.2 + 1.6 * self.random.random()), next(self._count), call))

    def soon(self, thread: Thread) -> None:
        """Let a thread go on when the others have done what they can at this time."""
        self._soon.append(thread)

    def run(self) -> None:
        """Until nothing moves any more."""
        while self._soon or self._later:
            if self._soon:
                self._resume(self._soon.popleft())
            else:
                self.now, _, call = heappop(self._later)
                call()

    def _resume(self, thread: Thread) -> None:
        for waits_for in thread:
            if isinstance(waits_for, float):
                return self.at(waits_for, partial(self._resume, thread))
            if not waits_for.is_set:
                return waits_for.threads.append(thread)


class Meeting:
    """Kernels on several devices that end together when all of them have started."""

    def __init__(self, clock: Clock, size: int) -> None:
        self._clock, self._size = clock, size
        self._ends: list[Callable[[], object]] = []

    def start(self, end: Callable[[], object]) -> None:
        """One of them has started; ``end`` is called when it ends."""
        self._ends.append(end)
        if len(self._ends) == self._size:
            while self._ends:
                self._clock.at(TRANSFER_TIME, self._ends.pop())


class Operation(Signal):
    """A kernel, or with no duration a wait for events; it is set when it is done.

    Args:
        clock: of the simulation.
        queue: the hardware queue that it goes through.
        duration: of a kernel that waits for no other.
        meeting: of a kernel that does.
        spins: whether it takes part of the device while it waits.
    """

    __slots__ = ("blockers", "duration", "followers", "meeting", "queue", "spins")

    def __init__(
        self, clock: Clock, queue: deque[Operation], duration: float, meeting: Meeting | None, spins: bool
    ) -> None:
        super().__init__(clock)
        self.queue, self.duration, self.meeting, self.spins = queue, duration, meeting, spins
        self.blockers = 0  # how many it still waits for
        self.followers: list[Operation] = []

    def follow(self, other: Operation) -> None:
        """Start after another one is done."""
        if not other.is_set:
            self.blockers += 1
            other.followers.append(self)


class Device:
    """Streams, and the hardware queues that feed them.

    Args:
        clock: of the simulation.
        queue_of: stream -> its hardware queue.
        slowdown: the further share of its time that a kernel takes if another one spins beside it.
    """

    def __init__(self, clock: Clock, queue_of: Queues, slowdown: float = 0.0) -> None:
        self.clock, self._queue_of, self._slowdown = clock, queue_of, slowdown
        self._spinning = 0
        self._queues: defaultdict[str, deque[Operation]] = defaultdict(deque)
        self.newest: dict[str, Operation] = {}  # stream -> what was launched there last

    def launch(
        self,
        stream: str,
        after: Operation | None = None,
        duration: float = 0.0,
        meeting: Meeting | None = None,
        spins: bool = False,
    ) -> Operation:
        """Put a kernel on a stream, or a wait for ``after``."""
        queue = self._queues[self._queue_of(stream)]
        operation = Operation(self.clock, queue, duration, meeting, spins)
        for before in (after, self.newest.get(stream)):
            if before is not None:
                operation.follow(before)
        self.newest[stream] = operation
        queue.append(operation)
        self._hand_over(queue)
        return operation

    def wait(self) -> Thread:
        """``torch.cuda.synchronize()``: for all that any thread has launched until now."""
        for operation in list(self.newest.values()):
            if not operation.is_set:
                yield operation

    def _hand_over(self, queue: deque[Operation]) -> None:
        while queue and not queue[0].blockers:
            operation = queue.popleft()
            if operation.meeting is not None:
                self._spinning += operation.spins
                operation.meeting.start(partial(self._end, operation))
            elif operation.duration:
                seconds = operation.duration * (1 + self._slowdown * (self._spinning > 0))
                self.clock.at(seconds, partial(self._end, operation))
            else:
                self._end(operation)

    def _end(self, operation: Operation) -> None:
        operation.set()
        self._spinning -= operation.spins
        while operation.followers:
            follower = operation.followers.pop(0)
            follower.blockers -= 1
            self._hand_over(follower.queue)
