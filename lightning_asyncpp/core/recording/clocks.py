"""The clock of what a stage does: its host's, or that of its device, where the host only launches what is done.

On a GPU a forward returns when its kernels are launched. There a moment is an event on the stream that computes: it
passes when the device has come to it. So work lasts as long as the device works at it, and a wait lasts as long as
that stream has nothing to do, however long the host waited meanwhile. Events are read when they have passed; nobody
waits for them. Their times are in seconds of the host's clock nevertheless: now and then an event is noted beside the
host's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

ANCHOR_SECONDS = 10.0
"""Between two anchors: the clocks drift apart, and torch gives times between events as 24 bits of milliseconds."""
_POLL_SECONDS = 1e-4


class Event(Protocol):
    """What is used of a ``torch.cuda.Event(enable_timing=True)`` that was recorded."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def elapsed_time(self, end_event: Event) -> float:
        """From here to another one, in milliseconds; both have passed."""


class Events(Protocol):
    """Where events are recorded."""

    def here(self) -> Event:
        """A new one, behind what this thread has launched."""

    def aside(self) -> Event:
        """A new one that passes at once, whatever is being computed."""


class Anchor:
    """A moment on both clocks.

    Args:
        event: it on the device.
        seconds: it on the host.
    """

    __slots__ = ("event", "seconds")

    def __init__(self, event: Event, seconds: float) -> None:
        self.event, self.seconds = event, seconds


class DeviceMoment:
    """A moment on the device, which has passed or is still to come.

    Args:
        event: the moment.
        anchor: what its time is counted from.
    """

    __slots__ = ("anchor", "event")

    def __init__(self, event: Event, anchor: Anchor) -> None:
        self.event, self.anchor = event, anchor


Moment = float | DeviceMoment


class Clock(Protocol):
    """Notes moments, and tells later when they were."""

    def now(self) -> Moment:
        """This moment, to be asked for later."""

    def when(self, moment: Moment) -> float | None:
        """When it was, in seconds of the host's ``time.perf_counter``; None if it is still to come."""

    def last(self, moments: Sequence[Moment]) -> Moment:
        """The last one of some, in the order in which they were to pass."""


class HostClock:
    """The host's own."""

    def now(self) -> float:
        """This moment, in seconds."""
        return time.perf_counter()

    def when(self, moment: Moment) -> float:
        """When it was, which is known at once."""
        assert isinstance(moment, float)
        return moment

    def last(self, moments: Sequence[Moment]) -> float:
        """The latest of some."""
        return max(self.when(moment) for moment in moments)


class DeviceClock:
    """That of a device, in the host's seconds. It may also be asked for moments of the host.

    Args:
        events: of the device; nothing is recorded before the first moment.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._anchor: Anchor | None = None

    def now(self) -> DeviceMoment:
        """When the device has come to this place, behind what this thread has launched; never waits."""
        anchor = self._anchor
        if anchor is None or time.perf_counter() - anchor.seconds > ANCHOR_SECONDS:
            anchor = self._anchor = Anchor(self._events.aside(), time.perf_counter())
        return DeviceMoment(self._events.here(), anchor)

    def when(self, moment: Moment) -> float | None:
        """When it was; None if the device has not come to it, or is broken and never will. Never waits."""
        if not isinstance(moment, DeviceMoment):
            return moment
        event, anchor = moment.event, moment.anchor
        try:
            passed = event.query() and anchor.event.query()
        except RuntimeError:  # said by whoever computes there
            return None
        return anchor.seconds + anchor.event.elapsed_time(event) * 1e-3 if passed else None

    def last(self, moments: Sequence[Moment]) -> Moment:
        """The last of some on one stream, in their order."""
        return moments[-1]


class CudaEvents:
    """Those of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: torch.cuda.Stream | None = None

    def here(self) -> Event:
        """On the stream that this thread launches on."""
        event: Event = torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))
        return event

    def aside(self) -> Event:
        """On a stream of its own, with nothing before it."""
        if self._idle is None:
            self._idle = torch.cuda.Stream(self._device, priority=-1)  # from a pool that few take from
        event: Event = self._idle.record_event(torch.cuda.Event(enable_timing=True))
        return event


HOST = HostClock()


def clock_of(device: torch.device) -> Clock:
    """The clock of what is computed on a device."""
    return DeviceClock(CudaEvents(device)) if device.type == "cuda" else HOST


def has_passed(clock: Clock, moment: Moment, seconds: float) -> bool:
    """Whether a moment passes within some time: for the end of a recording, not for what has to go on."""
    limit = time.perf_counter() + seconds
    while clock.when(moment) is None:
        if time.perf_counter() > limit:
            return False
        time.sleep(_POLL_SECONDS)
    return True
