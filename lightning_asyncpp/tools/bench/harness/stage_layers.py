"""What the stages of a benchmark do: layers that sleep, or multiply matrices, and record when.

Schedules that run the gradients of inputs and of weights apart get a layer whose backward sleeps in two places: one
part on the way of the gradient to the input, one on its way to the weight. torch runs the first without the second
and the second later, except in front of the first stage, where it leaves everything to the second run.
"""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span, Trace
from lightning_asyncpp.tools.bench.harness.job import Job


def jitter_factor(sigma: float, seed: int, stage: int, micro_batch: int, kind: Kind) -> float:
    """What the length of a forward or a backward is multiplied by: lognormal, with median 1.

    The same arguments give the same factor in every process and for every system, so that their pairs are fair.

    Args:
        sigma: standard deviation of the factor's logarithm; 0 gives 1.
        seed: of the whole run.
        stage: of the pipeline, 0 first; the parts of a stage that is cut into chunks share its factors.
        micro_batch: counted over the run.
        kind: forward or backward.
    """
    if sigma == 0:
        return 1.0
    return random.Random(f"{seed}/{stage}/{micro_batch}/{kind.value}").lognormvariate(0.0, sigma)


@dataclass(frozen=True)
class Sleeps:
    """How long a layer sleeps for each micro-batch.

    Attributes:
        forward_ms: in its forward.
        backward_ms: in its backward, in all.
        weight_share: the part of the backward that belongs to the weight's gradient, where the two run apart.
        stage: that the layer is (a part of).
        jitter, seed: see :func:`jitter_factor`.
    """

    forward_ms: float
    backward_ms: float
    weight_share: float = 0.0
    stage: int = 0
    jitter: float = 0.0
    seed: int = 0

    def seconds(self, micro_batch: int) -> tuple[float, float, float]:
        """In the forward, for the gradient of the input, for that of the weight."""
        forward = self.forward_ms * self._factor(micro_batch, Kind.FORWARD) / 1e3
        backward = self.backward_ms * self._factor(micro_batch, Kind.BACKWARD) / 1e3
        weight = backward * self.weight_share
        return forward, backward - weight, weight

    def _factor(self, micro_batch: int, kind: Kind) -> float:
        return jitter_factor(self.jitter, self.seed, self.stage, micro_batch, kind)


class SleepingLayer(nn.Module):
    """Multiplies with a weight and sleeps: the machine's speed and number of cores hardly matter.

    Every call of the forward is a new micro-batch.

    Args:
        sleeps: how long.
        width: size of the last dimension.
        meter: records the sleeps, as they were, not as they were asked for; their index is the micro-batch.
    """

    def __init__(self, sleeps: Sleeps, width: int, meter: Trace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.sleeps = sleeps
        self.meter = meter
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and multiply."""
        k, self.calls = self.calls, self.calls + 1
        forward, for_input, for_weight = self.sleeps.seconds(k)
        weight: Tensor = self.weight
        if for_weight:
            weight = _Sleep.apply(weight, 0.0, _Nap(for_weight, k, self.meter))
        return _Sleep.apply(x * weight, forward, _Nap(for_input, k, self.meter))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Nap:
    """The sleep of a backward."""

    seconds: float
    micro_batch: int
    meter: Trace

    def take(self, kind: Kind, seconds: float) -> None:
        if seconds:
            with self.meter.span(kind, self.micro_batch):
                time.sleep(seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, later: _Nap) -> Tensor:
        ctx.later = later
        later.take(Kind.FORWARD, seconds)
        return x.clone()  # no view: torch's zero-bubble schedules detach what a stage returns in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.later.take(Kind.BACKWARD, ctx.later.seconds)
        return gradient, None, None


class ComputingLayer(nn.Module):
    """A chain of residual blocks, x + norm(x) @ w, between two markers that take the time.

    The gradient of the input is computed on every stage, also on the first: all stages cost the same.

    Args:
        blocks: length of the chain.
        width: size of the last dimension.
        meter: records how long forward and backward take.
    """

    def __init__(self, blocks: int, width: int, meter: Trace) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(blocks)))
        self.meter = meter
        self._anchor = torch.zeros((), requires_grad=True)  # no parameter: lets the markers see every backward

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks."""
        watch = _Watch(self.meter)
        return _Leave.apply(self.blocks(_Enter.apply(x, self._anchor, watch)), watch)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))  # type: ignore[no-any-return]


class _Watch:
    """Times one forward and its backward."""

    def __init__(self, meter: Trace) -> None:
        self.meter = meter
        self.started = 0.0

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self, kind: Kind) -> None:
        self.meter.spans.append(Span(kind, 0, self.started, time.perf_counter()))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        watch.start()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.watch.stop(Kind.BACKWARD)
        return gradient, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        watch.stop(Kind.FORWARD)
        return x.clone()  # no view: torch's zero-bubble schedules detach what a stage returns in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.watch.start()
        return gradient, None


def block_seconds(rows: int, width: int, blocks: int = 4, runs: int = 15) -> float:
    """Time of forward and backward of one block of a :class:`ComputingLayer`, the median of ``runs``.

    It is this thread's own processor time: what else the machine does must not change the size of the work.
    """
    layer = ComputingLayer(blocks, width, Trace(0))
    x = torch.randn(rows, width)
    times = []
    for _ in range(runs + 3):
        start = time.thread_time()
        layer(x).sum().backward()
        times.append(time.thread_time() - start)
    return sorted(times[3:])[runs // 2] / blocks


LEARNING_RATE = 0.01


class LayerFactory(Protocol):
    """Makes a stage, or one of the equal chunks that it is cut into."""

    def __call__(self, meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        """Make it.

        Args:
            meter: records its forwards and backwards.
            stage: which one, 0 first; chunks name the stage that they are a part of.
            chunks: how many the stage is cut into.
            split_backward: whether the gradients of inputs and of weights run apart.
        """


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def layer_factory(job: Job) -> tuple[LayerFactory, dict[str, float]]:
    """What makes the job's layers, and what was found out on the way; a collective call."""
    return (functools.partial(_sleeping, job), {}) if job.work == "sleep" else _calibrated(job)


def _sleeping(job: Job, meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
    share = job.weight_share if split_backward else 0.0
    sleeps = Sleeps(job.forward_ms / chunks, job.backward_ms / chunks, share, stage, job.jitter, job.seed)
    return SleepingLayer(sleeps, job.width, meter)


def _calibrated(job: Job) -> tuple[LayerFactory, dict[str, float]]:
    dist.barrier()  # all processes calibrate at once, as they compute at once later
    seconds = torch.tensor(block_seconds(job.rows, job.width), dtype=torch.float64)
    dist.all_reduce(seconds)
    per_block = float(seconds) / job.stages
    blocks = 2 * max(1, round(job.target_ms / 2e3 / per_block))  # even: interleaved schedules get half of them twice

    def make(meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        return ComputingLayer(blocks // chunks, job.width, meter)

    return make, {"blocks": float(blocks), "calibrated_ms": blocks * per_block * 1e3}
