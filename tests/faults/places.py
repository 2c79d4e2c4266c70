"""Fault injection in a rank's process: visits to named places are counted, and a fault occurs at a given count."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lightning_asyncpp

PACKAGE = str(Path(lightning_asyncpp.__file__).parent)
MISTAKE = "the user's own mistake"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "cut": signal.SIGSTOP}
_SPARE_BYTES = 96 * 2**20
_MISSING_BYTES = 2**31


@dataclass(frozen=True)
class Fault:
    """Fault to inject.

    Attributes:
        what: kind of fault: a key of ``SIGNALS``, such as ``"kill"``, or a method of :class:`Places`.
        place: where it occurs; ``"call"`` is a call of any function of the package in the main thread, ``"storage"``
            a call of any function of its storage, in any thread.
        rank: rank on which it occurs.
        at: number of earlier visits to the place.
        process: process to signal instead of the rank's, if not 0; for ``"cut"``, the relay of packets.
    """

    what: str
    place: str
    rank: int
    at: int
    process: int = 0


class Places:
    """Counter of this process's visits to each place, which triggers the fault.

    Args:
        rank: rank of this process.
        fault: fault to inject, on whichever rank; ``None`` for no fault.
        folder: folder for the ranks' files; the litdata dataset is next to it.
        is_counted: whether calls are counted even if the fault occurs at none of them; counting makes calls slow.
    """

    def __init__(self, rank: int, fault: Fault | None, folder: Path, is_counted: bool = False) -> None:
        self.data = folder.parent / "data"
        self.counts: Counter[str] = Counter()
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._happened, self._reached = folder / f"{rank}.happened", folder / f"{rank}.reached"
        self._process = os.getpid()
        self._sees_calls = is_counted or (self._fault is not None and self._fault.place in ("call", "storage"))
        self._places_of: dict[CodeType, tuple[str, ...]] = {}
        self._fsync = os.fsync

    def start(self) -> None:
        """Start to count calls of ``os.fsync``, optimizer steps and, if they matter, calls of the package."""
        register_optimizer_step_pre_hook(lambda *_: self.here("optimizer"))
        os.fsync = self._sync  # type: ignore[assignment]
        if self._sees_calls:
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)

    def stop(self) -> None:
        """Disable the fault, and stop counting calls of the package."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        self._fault = None

    def reach(self, step: int) -> None:
        """Record the number of steps that are done."""
        self._reached.write_text(str(step))

    def here(self, place: str) -> None:
        """Count a visit to a place, and trigger the fault if it is due."""
        if self._is_due(place):
            self._happen()

    def spoilt(self, place: str, tensor: Tensor) -> Tensor:
        """Visit a place as :meth:`here` does; return the tensor, or NaNs if the fault ``"nan"`` is due."""
        spoil = self._fault is not None and self._fault.what == "nan"
        if self._is_due(place):
            if spoil:
                return tensor * float("nan")
            self._happen()
        return tensor

    def _is_due(self, place: str) -> bool:
        count = self.counts[place]
        self.counts[place] += 1
        fault = self._fault
        if fault is None or fault.place != place or fault.at != count or os.getpid() != self._process:
            return False
        self._happened.write_text(place)
        return True

    def _happen(self) -> None:
        assert self._fault is not None
        if (number := SIGNALS.get(self._fault.what)) is not None:
            os.kill(self._fault.process or os.getpid(), number)
        else:
            getattr(self, f"_{self._fault.what}")()

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        places = self._places_of.get(frame.f_code)
        if places is None:
            places = self._places_of[frame.f_code] = _places_of(frame.f_code.co_filename)
        for place in places:
            if place == "storage" or threading.current_thread() is threading.main_thread():
                self.here(place)

    def _sync(self, descriptor: int) -> None:
        self.here("disk")
        self._fsync(descriptor)

    def _leave(self) -> None:
        os._exit(0)

    def _raise(self) -> None:
        raise ArithmeticError(MISTAKE)

    def _full(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _memory(self) -> None:
        """Allocate more memory than the process may use, which leaves it little memory afterwards."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.empty(_MISSING_BYTES, dtype=torch.uint8)


def _places_of(file: str) -> tuple[str, ...]:
    if not file.startswith(PACKAGE):
        return ()
    return ("call", "storage") if file.startswith(f"{PACKAGE}/storage") else ("call",)


class _Backward(torch.autograd.Function):
    """Identity function that visits a place in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.places.spoilt("backward", gradient), None


def watch_layers(layers: Iterable[torch.nn.Module], places: Places) -> None:
    """Visit places in the forwards and backwards of all layers; forwards without gradients have a separate place."""

    def passed(_: Any, __: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            places.here("evaluation")
            return output
        return _Backward.apply(places.spoilt("forward", output), places)  # type: ignore[no-any-return]

    for layer in layers:
        layer.register_forward_hook(passed)
