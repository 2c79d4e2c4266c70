"""What a benchmark runs: the same description for every system that is compared, and for every process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Span

ASYNC, ASYNC_CLIPPED, ASYNC_FRESH, ASYNC_FABRIC = "async", "async+clip", "async+fresh", "async+fabric"
SYNC = "sync"
ONE_F_ONE_B, GPIPE, FLOOR = "1f1b", "gpipe", "floor"
TITLES = {
    ASYNC: "async_pipeline, through the Trainer",
    ASYNC_CLIPPED: "async_pipeline, clipping on",
    ASYNC_FRESH: "async_pipeline, fresh last stage",
    ASYNC_FABRIC: "async_pipeline, in a Fabric loop",
    SYNC: "sync_pipeline, through the Trainer",
    ONE_F_ONE_B: "torch Schedule1F1B",
    GPIPE: "torch ScheduleGPipe",
    FLOOR: "floor: no messages, no Trainer",
}
LAST_BATCHES = 1  # the last batch drains the pipeline: it is no steady state


@dataclass(frozen=True)
class Job:
    """A benchmark.

    Attributes:
        work: ``"sleep"`` or ``"compute"``.
        stages: number of stages P, one process each.
        micro_batches: micro-batches per mini-batch m.
        systems: what is compared, in the order in which a repeat runs them.
        repeats: how often each system is measured.
        mini_batches: mini-batches that are measured per repeat.
        warm_up: mini-batches before them.
        lookahead: of the asynchronous pipeline; None takes the strategy's default.
        forward_ms, backward_ms: how long a stage sleeps per micro-batch.
        target_ms: forward and backward of a computing stage per micro-batch; its depth is calibrated to it.
        rows, width: shape of a micro-batch.
        pinned: whether every process gets a core of its own, as far as there are enough.
        traced: whether the engine records its timeline.
    """

    work: str
    stages: int
    micro_batches: int
    systems: tuple[str, ...]
    repeats: int = 3
    mini_batches: int = 20
    warm_up: int = 3
    lookahead: int | None = None
    forward_ms: float = 20.0
    backward_ms: float = 40.0
    target_ms: float = 14.0
    rows: int = 1
    width: int = 16
    pinned: bool = False
    traced: bool = False

    @property
    def total_batches(self) -> int:
        """Mini-batches of one repeat."""
        return self.warm_up + self.mini_batches + LAST_BATCHES

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of all mini-batches of a repeat, the same on every rank; four different ones."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.micro_batches * self.rows, self.width)
        distinct = [
            (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(4)
        ]
        return [distinct[index % 4] for index in range(self.total_batches)]

    def save(self, path: Path) -> None:
        """Write the job for the worker processes."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "systems": tuple(fields["systems"])})


@dataclass
class RankRun:
    """What one process measured in one repeat of one system; times are seconds of ``time.perf_counter``.

    Attributes:
        system: what ran.
        stage: this process's stage.
        bodies: when the stage's own forward and backward bodies ran.
        marks: when each mini-batch ended here.
        trace: the engine's spans, if they were recorded.
    """

    system: str
    stage: int
    bodies: list[Span]
    marks: list[float]
    trace: list[Span]

    def to_json(self) -> dict[str, Any]:
        """Plain lists."""
        fields = {"system": self.system, "stage": self.stage, "marks": self.marks}
        return {**fields, "bodies": spans_to_json(self.bodies), "trace": spans_to_json(self.trace)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankRun:
        """Read what :meth:`to_json` wrote."""
        bodies, trace = spans_from_json(fields["bodies"]), spans_from_json(fields["trace"])
        return cls(fields["system"], fields["stage"], bodies, fields["marks"], trace)


def spans_to_json(spans: Sequence[Span]) -> list[list[Any]]:
    """Spans as lists [kind, index, start, end]."""
    return [[span.kind.value, span.index, span.start, span.end] for span in spans]


def spans_from_json(rows: Sequence[Sequence[Any]]) -> list[Span]:
    """Read what :func:`spans_to_json` wrote."""
    return [Span(Kind(kind), index, start, end) for kind, index, start, end in rows]
