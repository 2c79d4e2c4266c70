"""What a stage did when: a span for every forward, backward and update, and for what it waited for in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum

from lightning_asyncpp.core.recording.clocks import HOST, Clock, Moment, has_passed
from lightning_asyncpp.core.schedule import Kind


class Wait(str, Enum):
    """What a stage waited for; the members' values are the names in files."""

    ACTIVATION = "activation"  # of a micro-batch, from the stage before
    GRADIENT = "gradient"  # of a micro-batch, from the stage after
    AGREEMENT = "agreement"  # of all ranks on an update: norm, weights, flags; with replicas their reduction as well
    DATA = "data"  # the loader's next batch


class Beside(str, Enum):
    """What happens around or behind the work of a stage; the members' values are the names in files."""

    SEND = "send"  # handing a message to the transport: the time that it costs the stage, not that of the transfer
    REDUCE = "reduce"  # gradients of a mini-batch on their way over the replicas, in the background
    DRAIN = "drain"  # the pipeline is emptied: everything that happens meanwhile lies inside
    EVALUATE = "evaluate"  # a validation, whose own forwards are no part of a trace
    CHECKPOINT = "checkpoint"  # a pause between two batches in which a checkpoint was saved


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage did.

    Attributes:
        kind: forward, backward or update, a wait, or what else took time.
        index: the micro-batch counted over the run; of updates, agreements, reductions, drains and data the mini-batch.
        start: when it began, in seconds of ``time.perf_counter`` (of this process), on a GPU when the GPU did.
        end: when it ended.
        version: the weights W_v that a forward or backward ran on, that an update made; -1 elsewhere.
        num_bytes: size of what was sent, received or reduced, in bytes.
    """

    kind: Kind | Wait | Beside
    index: int
    start: float
    end: float
    version: int = -1
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span whose moments may be still to come, on a device; as :class:`Span` otherwise."""

    kind: Kind | Wait | Beside
    index: int
    start: Moment
    end: Moment
    version: int = -1
    num_bytes: int = 0


@dataclass
class Trace:
    """Spans of one stage in the order in which they ended.

    Attributes:
        stage: the stage.
        spans: what it did and has ended; without ``keep`` only what a follower has yet to read.
        keep: whether spans stay when all followers have read them.
        clock: by which the spans are measured.
    """

    stage: int
    spans: list[Span] = field(default_factory=list)
    keep: bool = True
    clock: Clock = HOST
    _running: deque[Recorded] = field(default_factory=deque)  # on the device; the host has launched it
    _let_go: int = 0
    _followers: list[Follower] = field(default_factory=list)

    def span(
        self, kind: Kind | Wait | Beside, index: int, version: int = -1, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs meanwhile, to be used in a ``with`` statement."""
        what = (kind, index, version, num_bytes)
        return RunningSpan(self.spans, what) if self.clock is HOST else LaunchedSpan(self, what)

    def record(self, span: Recorded) -> None:
        """Record something that was measured by moments of the trace's clock."""
        self._running.append(span)
        if self.clock is HOST:
            self.settle()

    @property
    def recorded(self) -> int:
        """How many spans were recorded, whether they have ended or not."""
        return self._let_go + len(self.spans) + len(self._running)

    def settle(self) -> None:
        """Take up what has ended; waits for nothing."""
        self.spans += take_ended(self._running, self.clock)

    def settle_all(self, seconds: float) -> None:
        """Take up all that ends within some time, at the end of a recording."""
        if self._running:
            has_passed(self.clock, self._running[-1].end, seconds)
        self.settle()

    def follow(self) -> Follower:
        """A new reader of the spans from here on."""
        follower = Follower(self)
        self._followers.append(follower)
        return follower

    @property
    def is_followed(self) -> bool:
        """Whether anybody reads the spans as they come."""
        return bool(self._followers)

    def _trim(self) -> None:
        """Let go of what every follower has read: a training of weeks must not fill the memory."""
        if self.keep or not self._followers:
            return
        read = min(len(self.spans), min(follower.position for follower in self._followers) - self._let_go)
        del self.spans[:read]
        self._let_go += read


class RunningSpan:
    """Something that a stage is doing: recorded when it ends, also if it fails.

    A class, because a generator takes twice as long, around everything that a stage does.

    Args:
        spans: where it is recorded.
        what: kind, index, version and number of bytes.
    """

    __slots__ = ("_spans", "_start", "_what")

    def __init__(self, spans: list[Span], what: tuple[Kind | Wait | Beside, int, int, int]) -> None:
        self._spans, self._what = spans, what

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter()
        kind, index, version, num_bytes = self._what
        self._spans.append(Span(kind, index, self._start, end, version, num_bytes))


class LaunchedSpan:
    """Something that a stage's host launches: recorded when it is launched, also if that fails; read when it has ended.

    Args:
        trace: where it is recorded.
        what: kind, index, version and number of bytes.
    """

    __slots__ = ("_start", "_trace", "_what")

    def __init__(self, trace: Trace, what: tuple[Kind | Wait | Beside, int, int, int]) -> None:
        self._trace, self._what = trace, what

    def __enter__(self) -> None:
        self._start = self._trace.clock.now()

    def __exit__(self, error: object, *_: object) -> None:
        kind, index, version, num_bytes = self._what
        with suppress(RuntimeError) if error else nullcontext():  # of a broken device the first error says more
            self._trace.record(Recorded(kind, index, self._start, self._trace.clock.now(), version, num_bytes))


class Follower:
    """Reads the spans of a trace while they come.

    Args:
        trace: what it reads.

    Attributes:
        position: how many spans of the trace it has read or skipped.
        on_close: called once when it is closed.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.position = trace.recorded
        self.on_close: Callable[[], object] = lambda: None

    @property
    def recorded(self) -> int:
        """The position behind everything that was recorded until now."""
        return self._trace.recorded

    def take(self, until: int | None = None) -> list[Span]:
        """What ended since the last call, or since it follows; waits for nothing.

        Args:
            until: up to this position; default: all.
        """
        trace = self._trace
        trace.settle()
        last = None if until is None else max(0, until - trace._let_go)
        new = trace.spans[self.position - trace._let_go : last]
        self.position += len(new)
        trace._trim()
        return new

    def take_all(self, seconds: float) -> list[Span]:
        """The same at the end of a recording, with all that ends within some seconds."""
        self._trace.settle_all(seconds)
        return self.take()

    def skip(self) -> None:
        """Leave out everything that was recorded until now."""
        self._trace.settle()
        self.position = self._trace.recorded
        self._trace._trim()

    def close(self) -> None:
        """Read no more; may be called twice."""
        if self in self._trace._followers:
            self._trace._followers.remove(self)
            self._trace._trim()
            self.on_close()


def take_ended(running: deque[Recorded], clock: Clock) -> list[Span]:
    """Remove what has ended from the beginning of what was recorded, and return it; waits for nothing."""
    spans = []
    while running:
        span = running[0]
        if (end := clock.when(span.end)) is None or (start := clock.when(span.start)) is None:
            break
        running.popleft()
        spans.append(Span(span.kind, span.index, start, max(start, end), span.version, span.num_bytes))
    return spans


def utilisation(spans: Sequence[Span], start: float, end: float) -> float:
    """Share of the time from ``start`` to ``end`` (seconds) that forwards and backwards took."""
    works = (Kind.FORWARD, Kind.BACKWARD)
    busy = sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in spans if span.kind in works)
    return busy / (end - start)
