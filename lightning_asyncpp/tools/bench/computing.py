"""A layer that multiplies matrices, and records when its own forward and backward ran."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Span, Trace


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
