"""What a pipeline without a flush gains in training a GPT over a slow network."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.models import GPT, GPTConfig
from research.benchmarks.options import parse_options
from research.benchmarks.processes import measure
from research.benchmarks.report import print_comparison
from research.benchmarks.run import Batch, Run
from research.benchmarks.stages import Meter

_VOCABULARY = 256


@dataclass(frozen=True)
class Network(Run):
    """A small GPT and AdamW on two hosts, with half of the stages each, or one of two replicas.

    The hosts are network namespaces of this machine (Linux, root; see link.py). Our strategies run through the Trainer,
    torch's Schedule1F1B in a plain loop, on the same cut and batches; the loss of the last mini-batch, which is shown,
    is the same for sync and 1f1b. How much of the way from a gradient to its update is hidden: `asyncpp trace` on what
    --trace records. All processes and the relay share the cores: with fewer cores than stages, computation overlaps
    less than on two real hosts. Not measured: start-up, loading, and how far one gets with an update.

    Attributes:
        replicas: number of data-parallel copies of the stages.
        layers, dim, context: of the GPT; ``dim`` is a multiple of 64.
        rows: sequences of a microbatch.
    """

    stages: int = 2
    microbatches: int = 4
    systems: tuple[str, ...] = ("async", "sync", "1f1b")
    hosts: int = 2
    link_latency_ms: float = 10.0
    link_mbit: float = 100.0
    replicas: int = 1
    layers: int = 4
    dim: int = 256
    context: int = 128
    rows: int = 4

    def make_model(self, meter: Meter) -> nn.Module:
        """Make the model, with the same weights in every process."""
        torch.manual_seed(0)
        return GPT(GPTConfig(_VOCABULARY, self.context, self.layers, self.dim, num_heads=self.dim // 64))

    def make_chunk(self, meter: Meter, stage: int, index: int, count: int, splits_backward: bool = False) -> nn.Module:
        """Make a chunk of the layers that our strategies put on its stage."""
        model = self.make_model(meter)
        layers: Any = model.pipeline_layers()  # type: ignore[operator]
        ends = [0, *itertools.accumulate(choose_partition(model, 0, count, "auto").counts)]
        return nn.Sequential(*layers[ends[index] : ends[index + 1]])

    def boundary(self, index: int, count: int) -> Tensor:
        """Return an example of tokens, the residual stream, or logits."""
        if index == 0:
            return torch.zeros(self.rows, self.context, dtype=torch.int64)
        return torch.zeros(self.rows, self.context, self.dim if index < count else _VOCABULARY)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make an AdamW."""
        return torch.optim.AdamW(module.parameters(), lr=1e-3)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next byte."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def batches(self, replica: int = 0) -> list[Batch]:
        """Consecutive bytes of Python's standard library, every ``replicas``-th sample of (context + 1) of them."""
        samples = self.total_batches * self.replicas * self.microbatches * self.rows
        count = samples * (self.context + 1)
        text = b""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if len(text) < count:
                text += path.read_bytes()
        text *= -(-count // len(text))
        tokens = torch.frombuffer(bytearray(text[:count]), dtype=torch.uint8).long().view(samples, self.context + 1)
        own = tokens[replica :: self.replicas].split(self.microbatches * self.rows)
        return [(batch[:, :-1], batch[:, 1:]) for batch in own]


def main(argv: Sequence[str]) -> None:
    """Measure, and print the table."""
    run = parse_options(Network, "network", argv)
    if "floor" in run.systems:
        raise ValueError("--systems floor: a stage of a GPT does not run alone. Leave it out.")
    run, measured = measure(run)
    message = run.rows * run.context * run.dim * 4
    print(f"{run.stages} stages, {run.replicas} replicas, {run.microbatches} microbatches, {message / 1e3:.0f} kB each")
    print_comparison(run, measured)
