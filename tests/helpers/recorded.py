"""Scenarios for the ranks of a pool: trainings that record what their stages do."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import DeviceClock, Trace
from lightning_asyncpp.tools.recorded_run import RecordedRun
from tests.helpers.cases import DIM
from tests.helpers.fake_device import LaggingDevice
from tests.helpers.trainer import Net, Run, fit

METER = Trace()
SPANS = METER.read()


class Sleep(torch.autograd.Function):
    """Autograd function that sleeps in forward, and twice as long in backward, and records when."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        with METER.span(Kind.FORWARD, 0):
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with METER.span(Kind.BACKWARD, 0):
            time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """Layer that multiplies its input by a weight and sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(DIM)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call,no-any-return]


class SleepingNet(Net):
    """Module of two layers that each sleep ``times`` x 30 ms in forward and x 60 ms in backward, and record when."""

    def __init__(self, run: Run, times: float = 1.0) -> None:
        super().__init__(run)
        SPANS.unread.clear()
        self.model = nn.Sequential(SleepingLayer(0.03 * times), SleepingLayer(0.03 * times))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.model(batch["x"]).mean(1, keepdim=True), batch["y"])


class WallClock(L.Callback):
    """Callback that independently measures the training time, from the first batch to the end of the last one."""

    times: tuple[float, float] = (0.0, 0.0)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            type(self).times = (time.perf_counter(), 0.0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        type(self).times = (self.times[0], time.perf_counter())


@dataclass(frozen=True)
class Slept:
    """Seconds that a stage's layers slept while the :class:`WallClock` ran, and how long it ran."""

    asleep: float
    elapsed: float


def fit_asleep(run: Run, times: float = 1.0) -> Slept:
    """Train with layers that sleep, after a short training in the same process, since first calls take long."""
    fit(replace(run, module=SleepingNet, samples=run.batch_size, callbacks=()))
    fit(replace(run, module=functools.partial(SleepingNet, times=times), callbacks=(*run.callbacks, (WallClock, {}))))
    start, end = WallClock.times
    asleep = sum(min(span.end, end) - max(span.start, start) for span in SPANS.unread if span.end > start)
    return Slept(asleep, end - start)


def fit_twice(run: Run) -> list[str]:
    """Train twice with the same arguments, and return the names in the trace's parent folder."""
    fit(run)
    fit(run)
    dist.barrier()
    return sorted(str(path.name) for path in Path(run.callbacks[0][1]["dirpath"]).parent.iterdir())


class Lags(L.Callback):
    """Callback, to be listed first, that times this rank as on a device that lags behind its host."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.strategy.session.running().runner.clock = DeviceClock(LaggingDevice())  # type: ignore[attr-defined]


class KilledError(RuntimeError):
    """Stand-in for anything that ends a run from outside."""


class EndsSuddenly(L.Callback):
    """Callback that fails on all ranks after the fourth batch."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise KilledError


def off_schedule(run: RecordedRun) -> list[str]:
    """Return which microbatches ran on another weight version than their stage's schedule prescribes."""
    return [
        f"{rank.meta.name}: {span.kind.value} {span.index} on W{span.version}"
        for rank in run.ranks
        for span in rank.of(Kind.FORWARD, Kind.BACKWARD)
        if span.version != rank.meta.schedule.stage_rule.version(*rank.places[span.index])
    ]
