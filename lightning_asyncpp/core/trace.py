"""Spans of what a stage does, on the clock of the device that does it, and how they add up.

On a GPU a forward returns when its kernels are launched. There a moment is a CUDA event on the computing stream, read
once it has passed and converted to seconds of the host's clock, so work lasts as long as the device works and a wait as
long as the stream is idle. Nothing here waits for a device, except the end of a recording, for a limited time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from lightning_asyncpp.core.schedule import Kind


class Wait(str, Enum):
    """Reason of a stage's wait; the values are the names in files."""

    ACTIVATION = "activation"  # of a microbatch, from the stage before
    GRADIENT = "gradient"  # of a microbatch, from the stage after
    AGREEMENT = "agreement"  # of all ranks on an update: norm, weights, flags, and the reduction over replicas
    DATA = "data"  # the loader's next batch


class Beside(str, Enum):
    """Activity around or behind the work of a stage; the values are the names in files."""

    SEND = "send"  # handing a message to the transport: what it costs the stage, not how long it travels
    REDUCE = "reduce"  # gradients of a mini-batch on their way over the replicas, in the background
    PENDING = "pending"  # from the complete gradient of a mini-batch until all ranks agree on its update
    DRAIN = "drain"  # the pipeline is emptied; everything that happens meanwhile lies inside
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


SpanKind = Kind | Wait | Beside
BACKGROUND = frozenset({Beside.REDUCE, Beside.PENDING})


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage did.

    Attributes:
        kind: what.
        index: the microbatch counted over the run; the mini-batch for everything that is not per microbatch.
        start: in seconds of ``time.perf_counter`` of this process.
        end: likewise.
        version: weights W_v that a forward or backward ran on, or that an update made; -1 elsewhere.
        num_bytes: size of what was sent or reduced.
    """

    kind: SpanKind
    index: int
    start: float
    end: float
    version: int = -1
    num_bytes: int = 0


# -- clocks -----------------------------------------------------------------------------------------------------------

ANCHOR_SECONDS = 10.0
"""Between two anchors: clocks drift, and torch returns times between events as 24 bits of milliseconds."""
_POLL_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class DeviceMoment:
    """A moment on a device, past or still to come: its event, and an event with the host's time of it."""

    event: Any
    anchor: Any
    anchor_seconds: float


Moment = float | DeviceMoment


class Clock(Protocol):
    """Marks moments and converts them to seconds later."""

    def now(self) -> Moment:
        """Mark this moment."""

    def when(self, moment: Moment) -> float | None:
        """Return when it was, in seconds of the host's clock; None if it is still to come."""

    def last(self, moments: Sequence[Moment]) -> Moment:
        """Return the last of some moments, given in the order in which they were marked."""


class HostClock:
    """The host's own clock."""

    def now(self) -> float:
        """Return the seconds."""
        return time.perf_counter()

    def when(self, moment: Moment) -> float:
        """Return the moment, which is known at once."""
        assert isinstance(moment, float)
        return moment

    def last(self, moments: Sequence[Moment]) -> float:
        """Return the latest."""
        return max(self.when(moment) for moment in moments)


class DeviceClock:
    """The clock of a device, in the host's seconds; it accepts moments of the host as well.

    Args:
        events: makes events: ``here()`` on the computing stream, ``aside()`` on an idle one.
    """

    def __init__(self, events: Any) -> None:
        self._events = events
        self._anchor: tuple[Any, float] | None = None

    def now(self) -> DeviceMoment:
        """Mark where the device is once it has done what this thread launched."""
        if self._anchor is None or time.perf_counter() - self._anchor[1] > ANCHOR_SECONDS:
            self._anchor = self._events.aside(), time.perf_counter()
        return DeviceMoment(self._events.here(), *self._anchor)

    def when(self, moment: Moment) -> float | None:
        """Return when it was; None if the device has not come to it, or is broken and never will."""
        if not isinstance(moment, DeviceMoment):
            return moment
        try:
            passed = moment.event.query() and moment.anchor.query()
        except RuntimeError:  # reported by what computes there
            return None
        return moment.anchor_seconds + moment.anchor.elapsed_time(moment.event) * 1e-3 if passed else None

    def last(self, moments: Sequence[Moment]) -> Moment:
        """Return the last one: on one stream events pass in their order."""
        return moments[-1]


class CudaEvents:
    """Makes events of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: torch.cuda.Stream | None = None

    def here(self) -> Any:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def aside(self) -> Any:
        """Record an event that passes at once, on a stream with nothing before it."""
        if self._idle is None:
            self._idle = torch.cuda.Stream(self._device, priority=-1)  # from a pool that few take from
        return self._idle.record_event(torch.cuda.Event(enable_timing=True))


HOST = HostClock()


def clock_of(device: torch.device) -> Clock:
    """Return the clock of what is computed on a device."""
    return DeviceClock(CudaEvents(device)) if device.type == "cuda" else HOST


def has_passed(clock: Clock, moment: Moment, seconds: float) -> bool:
    """Wait until a moment has passed, for some seconds at most; return whether it has."""
    limit = time.perf_counter() + seconds
    while clock.when(moment) is None:
        if time.perf_counter() > limit:
            return False
        time.sleep(_POLL_SECONDS)
    return True


# -- recording --------------------------------------------------------------------------------------------------------


class Trace:
    """The spans of one stage, distributed to readers as they end.

    Args:
        stage: the stage.
        clock: of what computes there.
        keep: whether ``spans`` collects everything, for as long as the trace lives.
    """

    def __init__(self, stage: int, clock: Clock = HOST, keep: bool = True) -> None:
        self.stage, self.clock, self.keep = stage, clock, keep
        self.spans: list[Span] = []
        self.readers: list[Reader] = []
        self._launched: deque[tuple[SpanKind, int, Moment, Moment, int, int]] = deque()

    def span(self, kind: SpanKind, index: int, version: int = -1, num_bytes: int = 0) -> RunningSpan:
        """Record what runs inside a ``with`` statement, also if it fails."""
        return RunningSpan(self, kind, index, version, num_bytes)

    def record(
        self, kind: SpanKind, index: int, start: Moment, end: Moment, version: int = -1, num_bytes: int = 0
    ) -> None:
        """Record something between two moments of the clock."""
        if self.clock is HOST:
            self._emit(Span(kind, index, start, end, version, num_bytes))  # type: ignore[arg-type]
        else:
            self._launched.append((kind, index, start, end, version, num_bytes))

    def settle(self, seconds: float = 0.0) -> None:
        """Emit what has ended, and what ends within some seconds."""
        if seconds and self._launched:
            has_passed(self.clock, self._launched[-1][3], seconds)
        while self._launched:
            kind, index, start, end, version, num_bytes = self._launched[0]
            ended, begun = self.clock.when(end), self.clock.when(start)
            if ended is None or begun is None:
                break
            self._launched.popleft()
            self._emit(Span(kind, index, begun, max(begun, ended), version, num_bytes))

    def read(self) -> Reader:
        """Return a new reader of what ends from here on."""
        reader = Reader(self)
        self.readers.append(reader)
        return reader

    def _emit(self, span: Span) -> None:
        if self.keep:
            self.spans.append(span)
        for reader in self.readers:
            reader.unread.append(span)


class RunningSpan:
    """A span under way. A class, because a generator would take twice as long around everything that a stage does."""

    __slots__ = ("_start", "_trace", "_what")

    def __init__(self, trace: Trace, kind: SpanKind, index: int, version: int, num_bytes: int) -> None:
        self._trace, self._what = trace, (kind, index, version, num_bytes)

    def __enter__(self) -> None:
        self._start = self._trace.clock.now()

    def __exit__(self, error: object, *_: object) -> None:
        kind, index, version, num_bytes = self._what
        try:
            self._trace.record(kind, index, self._start, self._trace.clock.now(), version, num_bytes)
        except RuntimeError:  # of a broken device, whose first error says more
            if error is None:
                raise


class Reader:
    """Reads the spans of a trace while they come.

    Attributes:
        unread: spans that have ended and were not taken.
        on_close: called once when it is closed.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.unread: list[Span] = []
        self.on_close: Callable[[], object] = lambda: None

    def take(self, until: float | None = None, seconds: float = 0.0) -> list[Span]:
        """Return what ended since the last call.

        Args:
            until: leave what ended after this moment, in seconds of the host's clock, to the next call.
            seconds: how long to wait for what a device has not come to.
        """
        self._trace.settle(seconds)
        taken = self.unread
        self.unread = [] if until is None else [span for span in taken if span.end > until]
        return taken if until is None else [span for span in taken if span.end <= until]

    def close(self) -> None:
        """Read no more; may be called twice."""
        with suppress(ValueError):
            self._trace.readers.remove(self)
            self.on_close()


# -- sums -------------------------------------------------------------------------------------------------------------

WORK = (Kind.FORWARD, Kind.BACKWARD)
REST = "rest"
"""Time that no span covers."""


def seconds_by_kind(spans: Iterable[Span], start: float, end: float) -> dict[SpanKind | str, float]:
    """Divide the time from ``start`` to ``end`` among what a stage did.

    Of spans inside each other the innermost counts. Waits inside a drain count as the drain; what runs in the
    background does not count.

    Returns:
        Seconds of each kind, and of ``REST``; they add up to ``end - start``.
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
        # What does not lie inside is over: by rounding one span may begin a moment before another ends.
        while under_way and under_way[-1][1] < max(span.end, span.start + 1e-9):
            advance(min(under_way[-1][1], span.start))
            under_way.pop()
        advance(span.start)
        draining = isinstance(span.kind, Wait) and any(kind is Beside.DRAIN for kind, _ in under_way)
        under_way.append((Beside.DRAIN if draining else span.kind, span.end))
    while under_way:
        advance(under_way[-1][1])
        under_way.pop()
    advance(end)
    return seconds


def utilisation(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the share of the time from ``start`` to ``end`` inside forwards and backwards."""
    seconds = seconds_by_kind(spans, start, end)
    return sum(seconds.get(kind, 0.0) for kind in WORK) / (end - start)
