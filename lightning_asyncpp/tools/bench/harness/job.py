"""What a benchmark runs: the same description for every system that is compared, and for every process."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import torch
from jsonargparse import Namespace
from torch import Tensor

from lightning_asyncpp.core.trace import Span

LAST_BATCHES = 1  # the last batch drains the pipeline: it is no steady state


@dataclass(frozen=True)
class Job:
    """A benchmark.

    Attributes:
        work: ``"sleep"`` or ``"compute"``.
        stages: number of stages P, one process each.
        micro_batches: micro-batches per mini-batch m.
        systems: what is compared; :meth:`order` is the order in which a repeat runs them.
        repeats: how often each system is measured.
        mini_batches: mini-batches that are measured per repeat.
        warm_up: mini-batches before them.
        lookahead: of the asynchronous pipeline; None takes the strategy's default.
        forward_ms, backward_ms: how long a stage sleeps per micro-batch.
        weight_share: the part of the backward that is the weight's gradient, for schedules that run it apart.
        jitter, seed: spread of the sleeps, see :func:`.stage_layers.jitter_factor`.
        target_ms: forward and backward of a computing stage per micro-batch; its depth is calibrated to it.
        rows, width: shape of a micro-batch.
        pinned: whether every process gets a core of its own, as far as there are enough.
        traced: whether the engine records its timeline.
        hosts: network namespaces that the stages are spread over, 1 or 2.
        link_latency_ms: one way, of the link between two hosts.
        link_mbit: bandwidth of the link in Mbit/s, each way; 0: no limit.
    """

    work: str
    stages: int
    micro_batches: int
    systems: tuple[str, ...]
    repeats: int = 3
    mini_batches: int = 20
    warm_up: int = 6
    lookahead: int | None = None
    forward_ms: float = 20.0
    backward_ms: float = 40.0
    weight_share: float = 0.5
    jitter: float = 0.0
    seed: int = 0
    target_ms: float = 14.0
    rows: int = 1
    width: int = 16
    pinned: bool = False
    traced: bool = False
    hosts: int = 1
    link_latency_ms: float = 0.0
    link_mbit: float = 0.0

    @classmethod
    def of(cls, arguments: Namespace, work: str, **others: Any) -> Job:
        """The job of a benchmark's arguments, those that are called as attributes; ``others`` come before them."""
        given = {field.name: arguments[field.name] for field in fields(cls) if field.name in arguments}
        # Plain numbers: the parser's are of types of its own.
        plain = json.loads(json.dumps({**given, "work": work, **others}))
        return cls(**{**plain, "systems": tuple(plain["systems"])})

    @property
    def total_batches(self) -> int:
        """Mini-batches of one repeat."""
        return self.warm_up + self.mini_batches + LAST_BATCHES

    @property
    def busy_seconds(self) -> float:
        """How long one mini-batch keeps a stage busy, about."""
        each = self.target_ms if self.work == "compute" else self.forward_ms + self.backward_ms
        return self.micro_batches * each / 1e3

    def order(self, repeat: int) -> tuple[str, ...]:
        """The systems as ``repeat`` runs them: each repeat begins elsewhere, so that drift meets all alike."""
        first = repeat * len(self.systems) // self.repeats
        return self.systems[first:] + self.systems[:first]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of all mini-batches of a repeat, the same on every rank; four different ones."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.micro_batches * self.rows, self.width)
        distinct = [
            (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(4)
        ]
        return [distinct[index % 4] for index in range(self.total_batches)]


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
