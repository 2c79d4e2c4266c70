"""Readings that arrive late, as from a GPU that is behind its host."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.updates.update_queue import UpdateQueue
from tests.nccl_rules.emulated import emulate

_SHARE_THERE = 0.15


def read_late(rank: int) -> Callable[[], None]:
    """Let numbers come at random moments from now on, or when somebody waits; returns what :func:`emulate` does."""
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
        queue._late = True

    Reading.is_there, Reading.get = is_there, waited_for  # type: ignore[method-assign]
    UpdateQueue.__init__ = begin_late  # type: ignore[method-assign]
    return emulate(rank)
