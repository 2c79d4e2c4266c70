"""A device in simulated time for the clock of spans, and one in real time that lags behind its host."""

from __future__ import annotations

import struct
import time

LAG_SECONDS = 0.05


class FakeDevice:
    """A host and a device whose clock drifts from its own; stands for ``time`` and for the events of the device."""

    def __init__(self, drift: float = 0.0) -> None:
        self.host = 1000.0
        self.is_broken = False
        self.queries = 0
        self._drift = drift
        self._free = 0.0  # when the stream that computes will have done what was launched, by the device's clock

    @property
    def seconds(self) -> float:
        """What the device's clock says."""
        return (self.host - 900.0) * (1 + self._drift)

    def launch(self, seconds: float) -> None:
        """Something that takes the device so long, once it has come to it."""
        self._free = max(self._free, self.seconds) + seconds * (1 + self._drift)

    def perf_counter(self) -> float:
        return self.host

    def sleep(self, seconds: float) -> None:
        self.host += seconds

    def here(self) -> FakeEvent:
        return FakeEvent(self, max(self._free, self.seconds))

    def aside(self) -> FakeEvent:
        return FakeEvent(self, self.seconds)


class FakeEvent:
    """Stands for a ``torch.cuda.Event`` that was recorded."""

    def __init__(self, device: FakeDevice, passes: float) -> None:
        self._device, self._passes = device, passes
        self._check()

    def query(self) -> bool:
        self._check()
        self._device.queries += 1
        return self._device.seconds >= self._passes

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert all((self.query(), end_event.query())), "torch raises"
        milliseconds: float = struct.unpack("f", struct.pack("f", (end_event._passes - self._passes) * 1e3))[0]
        return milliseconds

    def _check(self) -> None:
        if self._device.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class LaggingDevice(FakeDevice):
    """One in real time, which comes to everything a little later than its host launches it."""

    @property
    def seconds(self) -> float:
        return time.perf_counter()

    def here(self) -> FakeEvent:
        return FakeEvent(self, self.seconds + LAG_SECONDS)
