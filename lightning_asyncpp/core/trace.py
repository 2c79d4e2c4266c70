"""Trace of a stage: times of its activities, measured by its device's clock, and sums of these times.

On a GPU a forward returns once its kernels are launched. So moments are CUDA events on the compute stream. Events that
have passed are converted to seconds of the host's clock, so that spans show when the device works or waits. Recording
never waits for a device, except for a limited time when the recording ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from lightning_asyncpp.core.schedule import Kind


class Wait(str, Enum):
    """Reason for a stage's wait; the values are names in trace files."""

    ACTIVATION = "activation"  # a microbatch's activation from the previous stage
    GRADIENT = "gradient"  # a microbatch's gradient from the next stage
    AGREEMENT = "agreement"  # the reduction over replicas, then control messages
    DATA = "data"  # the loader's next batch


class Activity(str, Enum):
    """Activity of a stage that is neither work nor a wait; the values are names in trace files."""

    SEND = "send"  # the stage hands a message to the transport; the transfer is not included
    REDUCE = "reduce"  # reduction of a mini-batch's gradient over replicas, in the background
    PENDING = "pending"  # from the complete gradient of a mini-batch until all ranks agree on its update
    DRAIN = "drain"  # finish of all microbatches in flight; contains all activities meanwhile
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


SpanKind = Kind | Wait | Activity
BACKGROUND = frozenset({Activity.REDUCE, Activity.PENDING})


@dataclass(frozen=True, slots=True)
class Span:
    """Span of time of one activity of a stage.

    Attributes:
        kind: kind of activity.
        index: microbatch counted over the run, or mini-batch if the activity is not per microbatch.
        start: start in seconds of this process's ``time.perf_counter``.
        end: end in the same seconds.
        version: weight version that a forward or backward ran on, or that an update made; -1 for other activities.
        num_bytes: bytes sent or reduced.
    """

    kind: SpanKind
    index: int
    start: float
    end: float
    version: int = -1
    num_bytes: int = 0


# -- clocks -----------------------------------------------------------------------------------------------------------

ANCHOR_SECONDS = 10.0
"""Maximum age of a new moment's anchor (:class:`DeviceMoment`): clocks drift, and torch measures with 24 bits only."""
_POLL_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class DeviceMoment:
    """Past or future moment on a device: its event, and an anchor, an event whose time on the host is known."""

    event: Any
    anchor: Any
    anchor_seconds: float


Moment = float | DeviceMoment


class HostClock:
    """Clock of the host."""

    def now(self) -> float:
        """Return the present time in seconds."""
        return time.perf_counter()

    def when(self, moment: Moment) -> float:
        """Return the moment, which is a time in seconds already."""
        assert isinstance(moment, float)
        return moment


class DeviceClock:
    """Clock of a device, in the host's seconds; also accepts moments of the host.

    Args:
        events: factory of events: ``here()`` on the compute stream, ``aside()`` on an idle stream.
    """

    def __init__(self, events: Any) -> None:
        self._events = events
        self._anchor: tuple[Any, float] | None = None

    def now(self) -> DeviceMoment:
        """Mark the moment at which the device completes the work that this thread has launched so far."""
        if self._anchor is None or time.perf_counter() - self._anchor[1] > ANCHOR_SECONDS:
            self._anchor = self._events.aside(), time.perf_counter()
        return DeviceMoment(self._events.here(), *self._anchor)

    def when(self, moment: Moment) -> float | None:
        """Return the time of a moment; None if the device has not reached it, or has failed."""
        if not isinstance(moment, DeviceMoment):
            return moment
        try:
            passed = moment.event.query() and moment.anchor.query()
        except RuntimeError:  # the device failed; its work reports the error
            return None
        return moment.anchor_seconds + moment.anchor.elapsed_time(moment.event) * 1e-3 if passed else None


class CudaEvents:
    """Factory of a GPU's events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: torch.cuda.Stream | None = None

    def here(self) -> Any:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def aside(self) -> Any:
        """Record an event on an idle stream, so that it passes at once."""
        if self._idle is None:
            self._idle = torch.cuda.Stream(self._device, priority=-1)  # few other streams have this priority
        return self._idle.record_event(torch.cuda.Event(enable_timing=True))


Clock = HostClock | DeviceClock
HOST = HostClock()


def clock_of(device: torch.device) -> Clock:
    """Return the clock for work on a device."""
    return DeviceClock(CudaEvents(device)) if device.type == "cuda" else HOST


# -- recording --------------------------------------------------------------------------------------------------------


class Trace:
    """Trace of one stage; readers get each span when it has ended.

    Args:
        clock: clock of the stage's device.
    """

    def __init__(self, clock: Clock = HOST) -> None:
        self.clock = clock
        self.readers: list[Reader] = []
        self._launched: deque[tuple[SpanKind, int, Moment, Moment, int, int]] = deque()

    def span(self, kind: SpanKind, index: int, version: int = -1, num_bytes: int = 0) -> RunningSpan:
        """Return a context manager that records its body as a span, even if the body fails."""
        return RunningSpan(self, kind, index, version, num_bytes)

    def record(
        self, kind: SpanKind, index: int, start: Moment, end: Moment, version: int = -1, num_bytes: int = 0
    ) -> None:
        """Record a span between two moments."""
        if self.clock is HOST:
            self._emit(Span(kind, index, start, end, version, num_bytes))  # type: ignore[arg-type]
        else:
            self._launched.append((kind, index, start, end, version, num_bytes))

    def settle(self, seconds: float = 0.0) -> None:
        """Emit spans that have ended, or that end within ``seconds``."""
        limit = time.perf_counter() + seconds
        while self._launched and self.clock.when(self._launched[-1][3]) is None and time.perf_counter() < limit:
            time.sleep(_POLL_SECONDS)
        while self._launched:
            kind, index, start, end, version, num_bytes = self._launched[0]
            ended, begun = self.clock.when(end), self.clock.when(start)
            if ended is None or begun is None:
                break
            self._launched.popleft()
            self._emit(Span(kind, index, begun, max(begun, ended), version, num_bytes))

    def read(self) -> Reader:
        """Return a new reader of spans that end from now on."""
        reader = Reader(self)
        self.readers.append(reader)
        return reader

    def _emit(self, span: Span) -> None:
        for reader in self.readers:
            reader.unread.append(span)


class RunningSpan:
    """Context manager that records a span; a `@contextmanager` generator would take twice as long."""

    __slots__ = ("_start", "_trace", "_what")

    def __init__(self, trace: Trace, kind: SpanKind, index: int, version: int, num_bytes: int) -> None:
        self._trace, self._what = trace, (kind, index, version, num_bytes)

    def __enter__(self) -> None:
        self._start = self._trace.clock.now()

    def __exit__(self, error: object, *_: object) -> None:
        kind, index, version, num_bytes = self._what
        try:
            self._trace.record(kind, index, self._start, self._trace.clock.now(), version, num_bytes)
        except RuntimeError:  # the device failed, and its first error says more than this one
            if error is None:
                raise


class Reader:
    """Reader of a trace's new spans.

    Attributes:
        unread: spans that have ended and were not returned by :meth:`take` yet.
        on_close: function called once when the reader is closed.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.unread: list[Span] = []
        self.on_close: Callable[[], object] = lambda: None

    def take(self, until: float | None = None, seconds: float = 0.0) -> list[Span]:
        """Return the spans that have ended since the last call.

        Args:
            until: time in seconds of the host's clock; spans that end later are left to the next call.
            seconds: longest wait for spans that a device has not completed.
        """
        self._trace.settle(seconds)
        taken = self.unread
        self.unread = [] if until is None else [span for span in taken if span.end > until]
        return taken if until is None else [span for span in taken if span.end <= until]

    def close(self) -> None:
        """Stop reading; may be called twice."""
        with suppress(ValueError):
            self._trace.readers.remove(self)
            self.on_close()


# -- sums -------------------------------------------------------------------------------------------------------------

WORK = (Kind.FORWARD, Kind.BACKWARD)
REST = "rest"
"""Time that no span covers, apart from spans in the background."""


def seconds_by_kind(spans: Iterable[Span], start: float, end: float) -> dict[SpanKind | str, float]:
    """Divide the time from ``start`` to ``end`` among a stage's activities.

    Of nested spans the innermost counts. Waits inside of a drain count as the drain. Spans in the background are
    ignored.

    Returns:
        Seconds of each kind and of ``REST``, with the sum ``end - start``.
    """
    seconds: dict[SpanKind | str, float] = {REST: 0.0}
    under_way: list[tuple[SpanKind, float]] = []
    now = start

    def advance(to: float) -> None:
        nonlocal now
        to = min(max(to, start), end)
        if to > now:
            kind = under_way[-1][0] if under_way else REST
            seconds[kind] = seconds.get(kind, 0.0) + to - now
            now = to

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.kind in BACKGROUND:
            continue
        # Spans that do not contain this one are over; the tolerance allows for rounding.
        while under_way and under_way[-1][1] < max(span.end, span.start + 1e-9):
            advance(min(under_way[-1][1], span.start))
            under_way.pop()
        advance(span.start)
        draining = isinstance(span.kind, Wait) and any(kind is Activity.DRAIN for kind, _ in under_way)
        under_way.append((Activity.DRAIN if draining else span.kind, span.end))
    while under_way:
        advance(under_way[-1][1])
        under_way.pop()
    advance(end)
    return seconds


def utilisation(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the share of the time from ``start`` to ``end`` in forwards and backwards."""
    seconds = seconds_by_kind(spans, start, end)
    return sum(seconds.get(kind, 0.0) for kind in WORK) / (end - start)
