"""Traces and those who read them while they grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import HOST, Beside, Span, Trace, Wait, utilisation
from lightning_asyncpp.strategy_parts.recording import follow


def spans(count: int, first: int = 0) -> list[Span]:
    return [Span(Kind.FORWARD, first + k, float(k), k + 0.5) for k in range(count)]


def test_a_span_is_recorded_even_when_what_runs_fails() -> None:
    trace = Trace(0)
    with pytest.raises(KeyError), trace.span(Wait.GRADIENT, 3, num_bytes=7):
        raise KeyError
    (span,) = trace.spans
    assert (span.kind, span.index, span.version, span.num_bytes) == (Wait.GRADIENT, 3, -1, 7)
    assert span.end >= span.start


def test_names_in_files_are_distinct() -> None:
    names = [kind.value for kinds in (Kind, Wait, Beside) for kind in kinds]
    assert len(set(names)) == len(names)


def test_utilisation_counts_forwards_and_backwards_in_between() -> None:
    found = utilisation([Span(Kind.FORWARD, 0, 0, 2), Span(Kind.UPDATE, 0, 2, 3), Span(Kind.BACKWARD, 0, 3, 9)], 1, 5)
    assert found == pytest.approx(3 / 4)


def test_followers_read_each_span_once_at_their_own_pace() -> None:
    trace = Trace(0, keep=False)
    first = trace.follow()
    trace.spans += spans(2)
    second = trace.follow()
    trace.spans += spans(3, first=2)
    assert [span.index for span in second.take()] == [2, 3, 4]
    assert len(trace.spans) == 5  # the first has yet to read them
    assert [span.index for span in first.take()] == [0, 1, 2, 3, 4]
    assert trace.spans == []
    assert first.take() == second.take() == []
    trace.spans += spans(2, first=5)
    second.close()
    assert [span.index for span in first.take()] == [5, 6]


def test_a_kept_trace_loses_nothing() -> None:
    trace = Trace(0)
    follower = trace.follow()
    trace.spans += spans(3)
    assert len(follower.take()) == 3
    assert len(trace.spans) == 3


def engine(trace: Trace | None = None) -> Any:
    return SimpleNamespace(runner=SimpleNamespace(trace=trace, clock=HOST), mesh=SimpleNamespace(stage=2))


def test_the_first_reader_starts_the_recording_and_the_last_ends_it() -> None:
    watched = engine()
    first, second = follow(watched), follow(watched)
    assert watched.runner.trace.stage == 2
    first.close()
    first.close()
    assert watched.runner.trace is not None
    second.close()
    assert watched.runner.trace is None


def test_a_trace_of_somebody_else_stays() -> None:
    trace = Trace(0, spans(1))
    watched = engine(trace)
    follower = follow(watched)
    trace.spans += spans(1, first=1)
    assert [span.index for span in follower.take()] == [1]
    follower.close()
    assert watched.runner.trace is trace
    assert len(trace.spans) == 2
