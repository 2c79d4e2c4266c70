"""What a pipeline without a flush gains when stages compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from research.benchmarks.ideal import ideal_milliseconds, make_schedules
from research.benchmarks.options import parse_options
from research.benchmarks.processes import measure
from research.benchmarks.report import print_comparison
from research.benchmarks.run import Run
from research.benchmarks.stages import ComputingLayer, Meter, block_seconds


@dataclass(frozen=True)
class Compute(Run):
    """Gain over torch's measured Schedule1F1B where stages multiply matrices, one thread and one core each.

    A stage is a chain of x + norm(x) @ w, so long that a microbatch takes ``target_ms``. Messages,
    updates and all work of the frameworks share the cores with it, as in training on CPUs. All systems get batches that
    are there; ours call `self.log`. Gradients of weights that run apart (zero bubble) are in the time, but not in the
    utilisation. Not measured: memory, loading, start-up.

    Attributes:
        target_ms: forward and backward of a stage per microbatch, about.
        rows, width: shape of a microbatch.
        blocks: length of the chain; 0: calibrated.
    """

    stages: int = 2
    target_ms: float = 14.0
    rows: int = 512
    width: int = 128
    blocks: int = 0

    pinned = True

    def prepared(self) -> Compute:
        """Return the run with a calibrated chain: the mean over all processes, which calibrate at the same time."""
        if self.blocks:
            return self
        dist.barrier()
        seconds = torch.tensor(block_seconds(self.rows, self.width), dtype=torch.float64)
        dist.all_reduce(seconds)
        # Even, since interleaved schedules get half of it twice.
        return replace(self, blocks=2 * max(1, round(self.target_ms / 2e3 / (float(seconds) / self.stages))))

    def make_chunk(self, meter: Meter, stage: int, index: int, count: int, splits_backward: bool = False) -> nn.Module:
        """Make a part of the chain."""
        torch.manual_seed(index)
        return ComputingLayer(self.blocks * self.stages // count, self.width, stage, meter)


def main(argv: Sequence[str]) -> None:
    """Measure, and print the table."""
    run, measured = measure(parse_options(Compute, "compute", argv))
    flush, no_flush = (
        ideal_milliseconds(make_schedules(run.stages, delay), run.microbatches, 1.0, 2.0) for delay in (0, 1)
    )
    shape = f"{run.stages} stages, --blocks {run.blocks}, {run.microbatches} microbatches"
    print(f"{shape}: ideal gain {flush / no_flush:.3f}")
    print_comparison(run, measured)
