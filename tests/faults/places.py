"""Where something can go wrong in the process of a rank, and what: places count, and at some count it happens."""

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
    """One thing that goes wrong.

    Attributes:
        what: a signal's short name, such as ``"kill"``, or a method of :class:`Places`.
        place: where; ``"call"`` is any function of the package in the main thread, ``"storage"`` any of its storage in
            whichever thread.
        rank: on which rank.
        at: how often the place was passed before.
        process: which is signalled instead; for ``"cut"``, the one that passes packets on.
    """

    what: str
    place: str
    rank: int
    at: int
    process: int = 0


class Places:
    """Counts how often this process passes each place, and lets the fault happen.

    Args:
        rank: of this process.
        fault: ``None``: nothing happens.
        folder: for files of the ranks, beside which lies a litdata dataset.
        is_counted: whether calls are counted although none of them goes wrong, which makes them slow.
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
        """Count what is written, steps of optimizers, and calls of the package if they matter, from now on."""
        register_optimizer_step_pre_hook(lambda *_: self.here("optimizer"))
        os.fsync = self._sync  # type: ignore[assignment]
        if self._sees_calls:
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)

    def stop(self) -> None:
        """Nothing goes wrong any more."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        self._fault = None

    def reach(self, step: int) -> None:
        """So many steps are done."""
        self._reached.write_text(str(step))

    def here(self, place: str) -> None:
        """The process is at this place."""
        if self._is_due(place):
            self._happen()

    def spoilt(self, place: str, tensor: Tensor) -> Tensor:
        """:meth:`here`, with a tensor that a fault makes NaN."""
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
        """More is needed than there is, and what is left afterwards is little."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.empty(_MISSING_BYTES, dtype=torch.uint8)


def _places_of(file: str) -> tuple[str, ...]:
    if not file.startswith(PACKAGE):
        return ()
    return ("call", "storage") if file.startswith(f"{PACKAGE}/storage") else ("call",)


class _Backward(torch.autograd.Function):
    """The identity, which passes a place in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.places.spoilt("backward", gradient), None


def watch_layers(layers: Iterable[torch.nn.Module], places: Places) -> None:
    """Let the forwards and backwards of all layers be places; forwards without gradients are one of their own."""

    def passed(_: Any, __: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            places.here("evaluation")
            return output
        return _Backward.apply(places.spoilt("forward", output), places)  # type: ignore[no-any-return]

    for layer in layers:
        layer.register_forward_hook(passed)
