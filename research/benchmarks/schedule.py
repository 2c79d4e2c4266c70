"""How busy schedules keep stages that sleep: the result depends on the schedule, hardly on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from research.benchmarks.ideal import ideal_milliseconds, make_schedules
from research.benchmarks.options import parse_options
from research.benchmarks.processes import measure
from research.benchmarks.report import print_comparison
from research.benchmarks.run import RankRun, Run
from research.benchmarks.stages import Meter, SleepingLayer, Sleeps
from research.benchmarks.timelines import Panel, draw_panels

_SHOWN_BATCHES = 3


@dataclass(frozen=True)
class Schedule(Run):
    """Utilisation of stages that sleep, so that many of them run on few cores.

    Our strategies run as users run them: a Trainer collates samples, and every step calls `self.log`. torch's schedules
    and async+fabric run in a plain loop, on batches that are there already. The floor sleeps and steps as often,
    without messages, neighbours or Trainer. Not measured: memory, loading, start-up, and the last mini-batch, after
    which a pipeline drains.

    Attributes:
        forward_ms, backward_ms: how long a stage sleeps per microbatch; a chunk of two sleeps half as long.
        weight_share: part of a backward that is the gradient of the weights, where a schedule runs it apart.
        jitter, seed: every sleep is multiplied by a lognormal factor with this sigma, the same for all systems.
        svg: file for the measured timelines of sync and async.
    """

    forward_ms: float = 20.0
    backward_ms: float = 40.0
    weight_share: float = 0.5
    jitter: float = 0.0
    seed: int = 0
    svg: str = ""

    def make_chunk(self, meter: Meter, stage: int, index: int, count: int, splits_backward: bool = False) -> nn.Module:
        """A layer that sleeps for its part of a stage."""
        part, share = self.stages / count, self.weight_share if splits_backward else 0.0
        sleeps = Sleeps(self.forward_ms * part, self.backward_ms * part, share, stage, self.jitter, self.seed)
        return SleepingLayer(sleeps, self.width, meter)

    def loader(self, replica: int) -> DataLoader[Any]:
        """Samples to be collated."""
        inputs, targets = (torch.cat(tensors) for tensors in zip(*self.batches(replica), strict=True))
        return DataLoader(TensorDataset(inputs, targets), batch_size=self.microbatches * self.rows)


def main(argv: Sequence[str]) -> None:
    """Measure, and print the table."""
    run = parse_options(Schedule, "schedule", argv)
    _, measured = measure(run)
    print(f"{run.stages} stages, {run.microbatches} microbatches of {run.forward_ms:g} + {run.backward_ms:g} ms")
    for name, delay in (("without a flush", 1), ("with a flush", 0)):
        schedules = make_schedules(run.stages, delay, run.lookahead or 0)
        ideal = ideal_milliseconds(schedules, run.microbatches, run.forward_ms, run.backward_ms)
        print(f"ideal {name}, no messages, no jitter: {ideal:.1f} ms")
    print_comparison(run, measured)
    if run.svg:
        _draw(run, measured)


def _draw(run: Schedule, measured: dict[str, list[list[RankRun]]]) -> None:
    """A few mini-batches in the steady state, on one time scale."""
    titles = {"sync": "sync_pipeline: 1F1B, a flush per mini-batch", "async": "async_pipeline: no flush"}
    shown = min(_SHOWN_BATCHES, run.mini_batches)
    panels, lengths = [], []
    for system, title in titles.items():
        ranks = sorted(measured[system][0], key=lambda rank: rank.stage)
        start, end = ranks[0].clock.marks[run.warm_up - 1], ranks[0].clock.marks[run.warm_up - 1 + shown]
        panels.append(Panel(title, [rank.spans for rank in ranks], start))
        lengths.append(end - start)
    title = f"Measured: {run.stages} stages, {run.microbatches} microbatches per mini-batch"
    draw_panels(run.svg, title, panels, max(lengths), "ms", 1e3)
