"""Spans on a device have the right times, readers start and end the recording, and seconds by kind add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core import trace as module
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import (
    ANCHOR_SECONDS,
    HOST,
    REST,
    Activity,
    DeviceClock,
    Span,
    SpanKind,
    Trace,
    Wait,
    seconds_by_kind,
    utilisation,
)
from lightning_asyncpp.strategy_parts.recording import follow
from tests.helpers.fake_device import FakeDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(module, "time", device)
    return device


def traced(device: FakeDevice) -> Trace:
    return Trace(DeviceClock(device))


def test_a_span_lasts_as_long_as_the_device_works(device: FakeDevice) -> None:
    trace = traced(device)
    reader = trace.read()
    for k in range(3):
        with trace.span(Kind.FORWARD, k, version=2, num_bytes=5):
            device.launch(0.010)
            device.sleep(0.001)  # on the host
    assert reader.take() == []
    device.sleep(0.018)
    first, second = reader.take()  # the third is still running
    device.sleep(1.0)
    (third,) = reader.take()
    for k, span in enumerate((first, second, third)):
        assert (span.index, span.version, span.num_bytes) == (k, 2, 5)
        assert span.start == pytest.approx(1000.0 + 0.010 * k, abs=1e-6)
        assert span.end == pytest.approx(1000.0 + 0.010 * (k + 1), abs=1e-6)


@pytest.mark.parametrize(("busy", "waited"), [(0.050, 0.0), (0.010, 0.020), (0.0, 0.030)])
def test_a_wait_lasts_as_long_as_the_device_has_nothing_to_do(device: FakeDevice, busy: float, waited: float) -> None:
    trace = traced(device)
    reader = trace.read()
    device.launch(busy)
    with trace.span(Wait.ACTIVATION, 0):
        device.sleep(0.030)  # the host waits for a header
    device.sleep(1.0)
    (span,) = reader.take()
    assert span.end - span.start == pytest.approx(waited, abs=1e-6)


def test_clocks_that_drift_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an hour, a drift of 50e-6 adds up to 180 ms, and 24 bits resolve so many milliseconds to a quarter of one."""
    device = FakeDevice(drift=50e-6)
    monkeypatch.setattr(module, "time", device)
    trace = traced(device)
    reader = trace.read()
    for t in range(720):
        device.sleep(5.0)
        with trace.span(Kind.UPDATE, t):
            device.launch(0.010)
        device.sleep(0.1)
        (span,) = reader.take()
        assert span.start == pytest.approx(device.host - 0.1, abs=ANCHOR_SECONDS * 60e-6)
        assert span.end - span.start == pytest.approx(0.010, abs=5e-6)


def test_a_broken_device_hides_no_error(device: FakeDevice) -> None:
    def break_and_fail() -> None:
        device.is_broken = True
        raise KeyError

    trace = traced(device)
    reader = trace.read()
    with pytest.raises(KeyError), trace.span(Kind.BACKWARD, 0):
        break_and_fail()
    assert reader.take(seconds=1.0) == []


def test_the_first_reader_starts_the_recording_and_the_last_ends_it() -> None:
    watched: Any = SimpleNamespace(runner=SimpleNamespace(trace=None, clock=HOST))
    first, second = follow(watched), follow(watched)
    first.close()
    first.close()
    assert watched.runner.trace is not None
    second.close()
    assert watched.runner.trace is None


# -- sums -------------------------------------------------------------------------------------------------------------

kinds = st.sampled_from([*Kind, *Wait, *Activity])
times = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.tuples(kinds, times, times), max_size=30))
def test_seconds_always_add_up(spans: list[tuple[SpanKind, float, float]]) -> None:
    """The seconds add up to the whole time, however spans overlap each other and the edges."""
    seconds = seconds_by_kind([Span(kind, 0, min(a, b), max(a, b)) for kind, a, b in spans], 2.0, 7.0)
    assert sum(seconds.values()) == pytest.approx(5.0)
    assert all(value >= 0 for value in seconds.values())


def test_the_innermost_span_counts_and_waits_in_a_drain_are_the_drain() -> None:
    spans = [
        Span(Kind.FORWARD, 0, 1, 5), Span(Activity.SEND, 0, 3, 4), Span(Activity.REDUCE, 0, 0, 9),
        Span(Wait.DATA, 0, 5, 6), Span(Activity.DRAIN, 0, 6, 10), Span(Wait.GRADIENT, 0, 6, 8),
        Span(Kind.BACKWARD, 0, 8, 9),
    ]  # fmt: skip
    assert seconds_by_kind(spans, 0, 12) == {
        REST: 3, Kind.FORWARD: 3, Activity.SEND: 1, Wait.DATA: 1, Activity.DRAIN: 3, Kind.BACKWARD: 1,
    }  # fmt: skip
    assert utilisation(spans, 4, 9) == pytest.approx(2 / 5)
