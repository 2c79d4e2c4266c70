"""Spans on a device are those of the device, in the host's seconds, and reading them never waits."""

from __future__ import annotations

import pytest
import torch
from lightning_asyncpp.core.recording import clocks

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import ANCHOR_SECONDS, HOST, Beside, DeviceClock, Recorded, Trace, Wait, clock_of
from tests.core.fake_device import FakeDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(clocks, "time", device)
    return device


def traced(device: FakeDevice) -> Trace:
    return Trace(0, keep=False, clock=DeviceClock(device))


def test_a_span_lasts_as_long_as_the_device_works(device: FakeDevice) -> None:
    trace = traced(device)
    follower = trace.follow()
    for k in range(3):
        with trace.span(Kind.FORWARD, k, version=2, num_bytes=5):
            device.launch(0.010)
            device.sleep(0.001)  # of the host
    assert follower.take() == []
    device.sleep(0.018)
    first, second = follower.take()  # the third is still under way
    device.sleep(1.0)
    (third,) = follower.take()
    assert [(span.index, span.version, span.num_bytes) for span in (first, second, third)] == [
        (k, 2, 5) for k in range(3)
    ]
    for k, span in enumerate((first, second, third)):
        assert span.start == pytest.approx(1000.0 + 0.010 * k, abs=1e-6)
        assert span.end == pytest.approx(1000.0 + 0.010 * (k + 1), abs=1e-6)
    assert trace.spans == []


@pytest.mark.parametrize(("busy", "waited"), [(0.050, 0.0), (0.010, 0.020), (0.0, 0.030)])
def test_a_wait_lasts_as_long_as_the_device_has_nothing_to_do(device: FakeDevice, busy: float, waited: float) -> None:
    trace = traced(device)
    follower = trace.follow()
    device.launch(busy)
    with trace.span(Wait.ACTIVATION, 0):
        device.sleep(0.030)  # the host waits for a header
    device.sleep(1.0)
    (span,) = follower.take()
    assert span.end - span.start == pytest.approx(waited, abs=1e-6)


def test_reading_looks_at_no_more_than_what_has_ended(device: FakeDevice) -> None:
    trace = traced(device)
    follower = trace.follow()
    for k in range(100):
        with trace.span(Kind.FORWARD, k):
            device.launch(0.010)
    before, device.queries = device.host, 0
    assert follower.take() == []
    assert device.host == before
    assert device.queries <= 2


def test_clocks_that_drift_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty millionths in an hour are 180 ms, and 24 bits of so many milliseconds a quarter of one."""
    device = FakeDevice(drift=50e-6)
    monkeypatch.setattr(clocks, "time", device)
    trace = traced(device)
    follower = trace.follow()
    for t in range(720):
        device.sleep(5.0)
        with trace.span(Kind.UPDATE, t):
            device.launch(0.010)
        device.sleep(0.1)
        (span,) = follower.take()
        assert span.start == pytest.approx(device.host - 0.1, abs=ANCHOR_SECONDS * 60e-6)
        assert span.end - span.start == pytest.approx(0.010, abs=5e-6)


def test_a_follower_reads_up_to_a_position(device: FakeDevice) -> None:
    trace = traced(device)
    follower, other = trace.follow(), trace.follow()
    positions = []
    for k in range(4):
        with trace.span(Kind.FORWARD, k):
            device.launch(0.010)
        positions.append(follower.recorded)
    device.sleep(1.0)
    assert [[span.index for span in follower.take(position)] for position in positions] == [[0], [1], [2], [3]]
    assert len(other.take()) == 4
    assert trace.spans == []
    with trace.span(Beside.DRAIN, 0):
        device.launch(0.010)
    other.skip()
    late = trace.follow()
    assert [span.kind for span in follower.take_all(1.0)] == [Beside.DRAIN]
    assert other.take() == late.take() == []
    with trace.span(Beside.DRAIN, 1):
        pass
    assert [[span.index for span in reader.take()] for reader in (follower, other, late)] == [[1]] * 3


def test_the_end_waits_for_what_was_launched_but_not_for_ever(device: FakeDevice) -> None:
    trace = traced(device)
    follower = trace.follow()
    with trace.span(Kind.FORWARD, 0):
        device.launch(0.3)
    with trace.span(Kind.BACKWARD, 0):
        device.launch(3600)
    assert [span.kind for span in follower.take_all(1.0)] == [Kind.FORWARD]
    assert device.host == pytest.approx(1001.0, abs=0.01)


def break_and_fail(device: FakeDevice) -> None:
    device.is_broken = True
    raise KeyError


def test_a_broken_device_ends_nothing_and_hides_no_error(device: FakeDevice) -> None:
    trace = traced(device)
    follower = trace.follow()
    with trace.span(Kind.FORWARD, 0):
        device.launch(0.010)
    with pytest.raises(KeyError), trace.span(Kind.BACKWARD, 0):
        break_and_fail(device)
    device.sleep(1.0)
    assert follower.take() == []
    assert follower.take_all(1.0) == []


def test_spans_by_their_moments(device: FakeDevice) -> None:
    """A reduction runs beside what is computed; one that began before the recording has moments of the host."""
    clock = DeviceClock(device)
    trace = Trace(0, clock=clock)
    start = clock.now()
    device.launch(0.010)
    trace.record(Recorded(Beside.REDUCE, 4, start, clock.last([clock.now(), clock.now()]), num_bytes=7))
    trace.record(Recorded(Beside.REDUCE, 5, 999.0, 999.5))
    assert trace.spans == []
    device.sleep(1.0)
    trace.settle()
    assert [(span.index, span.num_bytes) for span in trace.spans] == [(4, 7), (5, 0)]
    assert [span.end - span.start for span in trace.spans] == pytest.approx([0.010, 0.5], abs=1e-6)


def test_moments_of_the_host_are_known_at_once() -> None:
    trace = Trace(0)
    trace.record(Recorded(Beside.REDUCE, 4, 1.0, HOST.last([3.0, 2.0]), num_bytes=7))
    assert [(span.start, span.end) for span in trace.spans] == [(1.0, 3.0)]
    assert HOST.when(HOST.now()) <= HOST.now()


def test_the_clock_is_that_of_what_computes() -> None:
    assert clock_of(torch.device("cpu")) is HOST
    assert isinstance(clock_of(torch.device("cuda", 1)), DeviceClock)
