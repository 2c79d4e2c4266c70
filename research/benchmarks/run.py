"""Run of a benchmark: the same model, batches and optimizer for every system and process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp.core.trace import Span
from research.benchmarks.stages import Meter

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets."""

LAST_BATCHES = 1  # the last mini-batch drains the pipeline: that is no steady state


@dataclass(frozen=True)
class Run:
    """A comparison of systems, each of which trains the same pipeline of ``stages`` processes.

    Attributes:
        systems: what is compared, in turn; each repeat begins with another one.
        repeats: how often each system is measured.
        mini_batches: mini-batches that are measured per repeat.
        warm_up: mini-batches before them, at least one.
        max_norm: to which our strategies under the Trainer clip gradients; 0: not at all.
        lookahead: of the asynchronous pipeline; default: the strategy's.
        trace: folder for the recordings of PipelineTrace, one for each repeat of our systems.
        csv: file for the figures of every repeat.
        hosts: 2 puts the halves of the pipeline into two network namespaces with a link between them.
        link_latency_ms, link_mbit: of that link, one way; 0 Mbit/s: no limit.
    """

    stages: int = 8
    microbatches: int = 8
    systems: tuple[str, ...] = ("async", "sync", "1f1b", "floor")
    repeats: int = 3
    mini_batches: int = 20
    warm_up: int = 6
    max_norm: float = 0.0
    lookahead: int | None = field(default=None, metadata={"type": int})
    trace: str = ""
    csv: str = ""
    hosts: int = 1
    link_latency_ms: float = 0.0
    link_mbit: float = 0.0

    replicas = 1  # a field where a benchmark has them, as the next ones
    rows = 1
    width = 16
    pinned = False

    def __post_init__(self) -> None:
        if self.warm_up < 1:
            raise ValueError(f"--warm-up {self.warm_up}: the clock starts when a mini-batch ends. Give 1 or more.")

    @property
    def processes(self) -> int:
        """Stages of all replicas."""
        return self.stages * self.replicas

    @property
    def total_batches(self) -> int:
        """Mini-batches of one repeat."""
        return self.warm_up + self.mini_batches + LAST_BATCHES

    def order(self, repeat: int) -> tuple[str, ...]:
        """Return the systems in the order of a repeat, so that other load on the machine hits all of them alike."""
        first = repeat * len(self.systems) // self.repeats
        return self.systems[first:] + self.systems[:first]

    def prepared(self) -> Run:
        """Return the run after calibration, which is a collective call."""
        return self

    def make_chunk(self, meter: Meter, stage: int, index: int, count: int, splits_backward: bool = False) -> nn.Module:
        """Chunk ``index`` of the ``count`` equal ones that the model is cut into, which runs on ``stage``."""
        raise NotImplementedError

    def make_model(self, meter: Meter) -> nn.Module:
        """Make the whole model, which our strategies cut."""
        return nn.Sequential(*(self.make_chunk(meter, stage, stage, self.stages) for stage in range(self.stages)))

    def boundary(self, index: int, count: int) -> Tensor:
        """An example of what enters chunk ``index`` of ``count``, or leaves the last one if that is ``count``."""
        return torch.empty(self.rows, self.width)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all systems."""
        return torch.optim.SGD(module.parameters(), lr=0.01)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a microbatch."""
        return F.mse_loss(output, target)

    def batches(self, replica: int = 0) -> list[Batch]:
        """All mini-batches of a replica; four different ones, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.microbatches * self.rows, self.width)
        distinct = [
            (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(4)
        ]
        return [distinct[index % 4] for index in range(self.total_batches)]

    def loader(self, replica: int) -> DataLoader[Any]:
        """Return the loader for our strategies; here of ready batches, as torch's schedules get."""
        return DataLoader(self.batches(replica), batch_size=None)  # type: ignore[arg-type]


@dataclass
class Clock:
    """When each mini-batch ended in this process.

    Attributes:
        marks: in seconds of ``time.perf_counter``.
        processor: in seconds of this process on a processor, all threads.
    """

    marks: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def mark(self) -> None:
        """Record the end of a mini-batch."""
        self.marks.append(time.perf_counter())
        self.processor.append(time.process_time())


@dataclass
class RankRun:
    """What one process measured of one system in one repeat.

    Attributes:
        system: what ran.
        stage: that the process had; -1 if its layers record nothing.
        spans: when its forwards and backwards ran, in seconds of ``time.perf_counter``.
        clock: when each mini-batch ended here.
        loss: of the last mini-batch, where it is known.
    """

    system: str
    stage: int
    spans: list[Span]
    clock: Clock
    loss: float | None
