"""What a stage did when: a span for every forward, backward and update, and for what it waited for in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from lightning_asyncpp.pipeline.schedule import Kind


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


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage did.

    Attributes:
        kind: forward, backward or update, a wait, or what else took time.
        index: the micro-batch counted over the run; of updates, agreements, reductions, drains and data the mini-batch.
        start: when it began, in seconds of ``time.perf_counter`` (of this process).
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


@dataclass
class Trace:
    """Spans of one stage in the order in which they ended.

    Attributes:
        stage: the stage.
        spans: what it did.
    """

    stage: int
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, kind: Kind | Wait | Beside, index: int, version: int = -1, num_bytes: int = 0) -> Iterator[None]:
        """Record what runs meanwhile."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(kind, index, start, time.perf_counter(), version, num_bytes))


def utilisation(spans: Sequence[Span], start: float, end: float) -> float:
    """Share of the time from ``start`` to ``end`` (seconds) that forwards and backwards took."""
    works = (Kind.FORWARD, Kind.BACKWARD)
    busy = sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in spans if span.kind in works)
    return busy / (end - start)
