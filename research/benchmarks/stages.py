"""Stages of a benchmark: layers that sleep, or multiply matrices, and record when.

torch's zero-bubble schedules run the gradient of the input and that of the weight apart. For them a layer sleeps in two
places of its backward: one part on the way of the gradient to the input, the other on its way to the weight.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span


@dataclass
class Meter:
    """Record of what a process's layers did; times are seconds of ``time.perf_counter``.

    Attributes:
        stage: of the layer that ran.
        spans: its forwards and backwards.
    """

    stage: int = -1
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def measure(self, stage: int, kind: Kind, index: int) -> Iterator[None]:
        """Record what happens in the block."""
        start = time.perf_counter()
        yield
        self.record(stage, kind, index, start)

    def record(self, stage: int, kind: Kind, index: int, start: float) -> None:
        """Record what began at ``start`` and ends now."""
        self.stage = stage
        self.spans.append(Span(kind, index, start, time.perf_counter()))


class _Hook(torch.autograd.Function):
    """Calls one function in the forward and another in the backward; ``anchor`` makes sure that there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, forward: Callable[[], None], backward: Callable[[], None]
    ) -> Tensor:
        ctx.call = backward
        forward()
        return x.clone()  # no view: zero-bubble schedules detach in place what a stage returns

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.call()
        return gradient, None, None, None


def jitter_factor(sigma: float, seed: int, stage: int, microbatch: int, kind: Kind) -> float:
    """Lognormal factor with median 1 of a forward or backward, the same for every system and in every process."""
    if sigma == 0:
        return 1.0
    return random.Random(f"{seed}/{stage}/{microbatch}/{kind.value}").lognormvariate(0.0, sigma)


@dataclass(frozen=True)
class Sleeps:
    """How long a layer sleeps for each microbatch.

    Attributes:
        forward_ms, backward_ms: in its forward and in its backward.
        weight_share: the part of the backward that is the gradient of the weight, where that runs apart.
        stage: that the layer belongs to.
        jitter, seed: see :func:`jitter_factor`.
    """

    forward_ms: float
    backward_ms: float
    weight_share: float = 0.0
    stage: int = 0
    jitter: float = 0.0
    seed: int = 0

    def seconds(self, microbatch: int) -> tuple[float, float, float]:
        """In the forward, for the gradient of the input, for that of the weight."""
        forward, backward = (
            ms / 1e3 * jitter_factor(self.jitter, self.seed, self.stage, microbatch, kind)
            for ms, kind in ((self.forward_ms, Kind.FORWARD), (self.backward_ms, Kind.BACKWARD))
        )
        weight = backward * self.weight_share
        return forward, backward - weight, weight


class SleepingLayer(nn.Module):
    """Multiplies with a weight and sleeps: the machine's speed and number of cores hardly matter.

    Args:
        sleeps: how long; every call of the forward is the next microbatch.
        width: size of the last dimension.
        meter: records the sleeps, as they were, not as they were asked for.
    """

    def __init__(self, sleeps: Sleeps, width: int, meter: Meter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.sleeps, self.meter, self.calls = sleeps, meter, 0

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and multiply."""
        k, self.calls = self.calls, self.calls + 1
        forward, for_input, for_weight = self.sleeps.seconds(k)
        weight: Tensor = self.weight
        if for_weight:
            weight = _Hook.apply(weight, None, _nothing, self._nap(Kind.BACKWARD, k, for_weight))
        naps = self._nap(Kind.FORWARD, k, forward), self._nap(Kind.BACKWARD, k, for_input)
        return _Hook.apply(x * weight, None, *naps)  # type: ignore[no-any-return]

    def _nap(self, kind: Kind, microbatch: int, seconds: float) -> Callable[[], None]:
        def sleep() -> None:
            with self.meter.measure(self.sleeps.stage, kind, microbatch):
                time.sleep(seconds)

        return sleep if seconds else _nothing


def _nothing() -> None:
    pass


class ComputingLayer(nn.Module):
    """A chain of residual blocks, x + norm(x) @ w, between two hooks that take the time.

    The gradient of the input is computed on every stage, also on the first: all stages cost the same.
    """

    def __init__(self, blocks: int, width: int, stage: int, meter: Meter) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(blocks)))
        self.stage, self.meter, self.calls = stage, meter, 0
        self._anchor = torch.zeros((), requires_grad=True)  # no parameter

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks."""
        k, self.calls = self.calls, self.calls + 1
        started = [0.0]

        def start() -> None:
            started[0] = time.perf_counter()

        def stop(kind: Kind) -> Callable[[], None]:
            return lambda: self.meter.record(self.stage, kind, k, started[0])

        entered = _Hook.apply(x, self._anchor, start, stop(Kind.BACKWARD))
        return _Hook.apply(self.blocks(entered), None, stop(Kind.FORWARD), start)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))  # type: ignore[no-any-return]


def block_seconds(rows: int, width: int, blocks: int = 4, runs: int = 15) -> float:
    """Processor time of this thread for forward and backward of a block, the median: other work must not change it."""
    layer, x, times = ComputingLayer(blocks, width, 0, Meter()), torch.randn(rows, width), []
    for _ in range(runs + 3):
        start = time.thread_time()
        layer(x).sum().backward()
        times.append(time.thread_time() - start)
    return sorted(times[3:])[runs // 2] / blocks
