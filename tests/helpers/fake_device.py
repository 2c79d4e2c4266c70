"""Fake devices for the clock of spans: one in simulated time, and one in real time that lags behind its host."""

from __future__ import annotations

import struct
import time

LAG_SECONDS = 0.05


class FakeDevice:
    """Fake of a host and a device with a drifting clock; replaces module ``time`` and the factory of events."""

    def __init__(self, drift: float = 0.0) -> None:
        self.host = 1000.0
        self.is_broken = False
        self.queries = 0
        self._drift = drift
        self._free = 0.0  # device time at which the compute stream completes all launched work

    @property
    def seconds(self) -> float:
        """Time of the device's clock."""
        return (self.host - 900.0) * (1 + self._drift)

    def launch(self, seconds: float) -> None:
        """Launch work that takes ``seconds`` on the device, after all earlier work."""
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
    """Fake of a recorded ``torch.cuda.Event``."""

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
    """Fake device in real time that completes work ``LAG_SECONDS`` after its host launches it."""

    @property
    def seconds(self) -> float:
        return time.perf_counter()

    def here(self) -> FakeEvent:
        return FakeEvent(self, self.seconds + LAG_SECONDS)
