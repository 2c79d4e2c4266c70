"""What a stage did when: one span per forward, backward and update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_asyncpp.pipeline.schedule import Kind


@dataclass(frozen=True)
class Span:
    """Work of one stage.

    Attributes:
        kind: forward, backward or update.
        index: the micro-batch, for an update the mini-batch.
        start: when it began, in seconds of ``time.perf_counter`` (of this process).
        end: when it ended. Waiting for a neighbour is outside.
    """

    kind: Kind
    index: int
    start: float
    end: float


@dataclass
class Trace:
    """Spans of one stage in the order in which they happened.

    Attributes:
        stage: the stage.
        spans: what it did.
    """

    stage: int
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, kind: Kind, index: int) -> Iterator[None]:
        """Record what runs meanwhile."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(kind, index, start, time.perf_counter()))


def utilisation(spans: Sequence[Span], start: float, end: float) -> float:
    """Share of the time from ``start`` to ``end`` (seconds) that forwards and backwards took."""
    busy = sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in spans if span.kind is not Kind.UPDATE)
    return busy / (end - start)
