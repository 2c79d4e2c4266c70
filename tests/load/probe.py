"""What a process holds and how long its steps take, looked at while it trains."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

STARTERS = (
    "isend",
    "irecv",
    "all_reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce",
    "barrier",
    "batch_isend_irecv",
)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """One look at a process.

    Attributes:
        step: number of training steps so far.
        resident: memory in use (RSS), in bytes.
        threads, python_threads: the system's, and those of them that Python started.
        files: open file descriptors, sockets among them.
        objects: that Python's garbage collector tracks, after a collection.
        blocks: of memory that Python's own allocator has given out.
        allocated: bytes that the C library's allocator has given out: tensors, above all.
        works: of torch.distributed, that are alive.
        wall, cpu: median of a step since the look before, in seconds; ``cpu`` is the time of all threads.
        reference: CPU time of a piece of work that is always the same, in seconds: how fast the machine is just now.
    """

    step: int
    resident: int
    threads: int
    python_threads: int
    files: int
    objects: int
    blocks: int
    allocated: int
    works: int
    wall: float
    cpu: float
    reference: float


class Probe:
    """Takes the time of every step, and a :class:`Sample` every ``every`` steps.

    Args:
        every: number of steps between two samples.
        works: that are alive, from :func:`watched_works`.
    """

    def __init__(self, every: int, works: weakref.WeakSet[Any]) -> None:
        self.every, self.works = every, works
        self._samples: list[tuple] = []  # of numbers alone, which the garbage collector does not track
        self._steps = 0
        self._last = (0.0, 0.0)
        self._walls: list[float] = []
        self._cpus: list[float] = []
        self._matrix = torch.ones(64, 64)

    @property
    def samples(self) -> list[Sample]:
        """What was seen so far."""
        return [Sample(*values) for values in self._samples]

    def start(self) -> None:
        """Training begins, or goes on after something else."""
        self._last = (time.perf_counter(), time.process_time())

    def step(self) -> None:
        """A step has ended."""
        now = (time.perf_counter(), time.process_time())
        self._walls.append(now[0] - self._last[0])
        self._cpus.append(now[1] - self._last[1])
        self._steps += 1
        if self._steps % self.every == 0:
            self._samples.append(self._look())
            self._walls.clear()
            self._cpus.clear()
            now = (time.perf_counter(), time.process_time())
        self._last = now

    def _look(self) -> tuple:
        wall, cpu = statistics.median(self._walls), statistics.median(self._cpus)
        gc.collect()
        return (
            self._steps, resident_bytes(), len(os.listdir("/proc/self/task")), threading.active_count(),
            len(os.listdir("/proc/self/fd")), len(gc.get_objects()),
            sys.getallocatedblocks(), allocated_bytes(), len(self.works), wall, cpu, self._reference(),
        )  # fmt: skip

    def _reference(self) -> float:
        """The median of some runs of what steps are made of: small operations of torch, called from Python."""
        times = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(50):
                torch.relu(self._matrix @ self._matrix)
            times.append(time.process_time() - start)
        return statistics.median(times)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


class _Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated_bytes() -> int:
    """What the C library's allocator has given out; 0 if it is not glibc's."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@contextmanager
def watched_works() -> Iterator[weakref.WeakSet[Any]]:
    """The works of torch.distributed that were started meanwhile, and that somebody still holds."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    originals = {name: getattr(dist, name) for name in STARTERS}

    def watching(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            for work in result if isinstance(result, list) else [result]:
                if isinstance(work, dist.Work):
                    alive.add(work)
            return result

        return call

    for name, function in originals.items():
        setattr(dist, name, watching(function))
    try:
        yield alive
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
