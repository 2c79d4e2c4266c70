"""A layer that sleeps in its forward and in its backward, and records when.

Schedules that run the gradients of inputs and of weights apart get a layer whose backward sleeps in two places: one
part on the way of the gradient to the input, one on its way to the weight. torch runs the first without the second
and the second later, except in front of the first stage, where it leaves everything to the second run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Trace
from lightning_asyncpp.tools.bench.jitter import jitter_factor


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
