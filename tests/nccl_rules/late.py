"""Emulation of readings that arrive late, as from a GPU that is behind its host."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.updates.mini_batch import MiniBatch
from lightning_asyncpp.core.updates.update_queue import UpdateQueue
from tests.nccl_rules.emulated import emulate

_SHARE_THERE = 0.15


def read_late(rank: int) -> Callable[[], None]:
    """Make readings arrive at random moments, or when they are waited for; return what :func:`emulate` returns."""
    moments = random.Random(rank)
    get, begin = Reading.get, UpdateQueue.__init__
    there: weakref.WeakSet[Reading] = weakref.WeakSet()

    def is_there(reading: Reading) -> bool:
        if moments.random() < _SHARE_THERE:
            there.add(reading)
        return reading in there

    def waited_for(reading: Reading) -> list[list[float]]:
        there.add(reading)
        return get(reading)

    def begin_late(queue: UpdateQueue, *args: Any) -> None:
        begin(queue, *args)
        queue._host_runs_ahead = True

    Reading.is_there, Reading.get = is_there, waited_for  # type: ignore[method-assign]
    know_on_device_alone()
    UpdateQueue.__init__ = begin_late  # type: ignore[method-assign]
    return emulate(rank)


def know_on_device_alone() -> None:
    """Make the check for finite gradients return a tensor, as if no host knew the result when it is applied."""

    def is_finite(mini_batch: MiniBatch) -> bool | Tensor:
        norms = list((mini_batch._norms or {}).values())
        return torch.stack(norms).isfinite().all() if norms else True

    MiniBatch._is_finite = is_finite  # type: ignore[method-assign]
