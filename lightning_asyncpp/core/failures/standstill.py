"""What is said of a rank that makes no progress: where its script is, and whether it waits for another one."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lightning_asyncpp.core.failures.cause import Cause
from lightning_asyncpp.errors import ProtocolError

GATHER_SECONDS = 1.0
"""How long rank 0 waits for the others' accounts after the first: ranks that wait for each other stop together."""
_PACKAGE = "lightning_asyncpp"
_LIBRARIES = frozenset({_PACKAGE, "torch", "lightning"})
_WAITS = ("torch.distributed", f"{_PACKAGE}.core.")
_DEBUGGERS = ("bdb", "pdb", "ipdb", "pydevd", "_pydevd_bundle", "debugpy")
_LOADERS = ("lightning.pytorch.loops.fetchers", f"{_PACKAGE}.fabric.loader", f"{_PACKAGE}.strategy_parts.stage_loader")
_LOOPS = {
    "lightning.pytorch.loops.evaluation_loop": "an evaluation's",
    "lightning.pytorch.loops.prediction_loop": "the prediction's",
    "lightning.pytorch.loops.training_epoch_loop": "the training",
    "lightning.pytorch.loops.fit_loop": "the training",
}
_SAVES = (f"{_PACKAGE}.storage.", f"{_PACKAGE}.core.checkpoint.saving")
_MOST_TEXT = 2**12


class Standstill(NamedTuple):
    """A rank's account.

    Attributes:
        seconds: without progress.
        place: where its script is, in words.
        waits: whether it is there for another rank.
    """

    seconds: float
    place: str
    waits: bool

    def pack(self) -> bytes:
        """It as rank 0 receives it: JSON."""
        return json.dumps([self.seconds, self.place[:_MOST_TEXT], self.waits]).encode(errors="replace")

    @classmethod
    def unpack(cls, data: bytes) -> Standstill:
        """Read what :meth:`pack` wrote.

        Raises:
            ProtocolError: it did not write this.
        """
        try:
            seconds, place, waits = json.loads(data)
        except (ValueError, TypeError, RecursionError):
            raise ProtocolError("this is no account of a standstill") from None
        if type(seconds) not in (int, float) or type(place) is not str or type(waits) is not bool:
            raise ProtocolError("this is no account of a standstill")
        return cls(float(seconds), place[:_MOST_TEXT], waits)


class Standstills:
    """Those of all ranks, on rank 0, until it is known what to say of them.

    One that waits for another rank ends nothing: that wait has a limit of its own.

    Args:
        stages: of all ranks.
        decide: called, maybe in another thread, with what all ranks are to be told.
    """

    def __init__(self, stages: Sequence[int], decide: Callable[[Cause], None]) -> None:
        self._stages, self._decide = stages, decide
        self._of: dict[int, Standstill] = {}
        self._adding = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_decided = False

    def add(self, rank: int, account: Standstill) -> None:
        """Take in that of a rank."""
        with self._adding:
            self._of[rank] = account
            if all(known.waits for known in self._of.values()):
                return
            is_complete = len(self._of) == len(self._stages)
            if not is_complete and self._timer is None:
                self._timer = threading.Timer(GATHER_SECONDS, self._decide_now)
                self._timer.daemon = True
                self._timer.start()
        if is_complete:
            self._decide_now()

    def _decide_now(self) -> None:
        with self._adding:
            if self._is_decided:
                return
            self._is_decided = True
            cause = told(self._of, self._stages)
        self._decide(cause)


def told(accounts: Mapping[int, Standstill], stages: Sequence[int]) -> Cause:
    """What went wrong, in one line.

    Args:
        accounts: by rank; one of them at least waits for nobody.
        stages: of all ranks.
    """
    places: dict[str, list[int]] = {}
    for rank, account in sorted(accounts.items()):
        if not account.waits:
            places.setdefault(account.place, []).append(rank)
    first = min(rank for rank, account in accounts.items() if not account.waits)
    who = {place: ", ".join(f"rank {rank} (stage {stages[rank]})" for rank in ranks) for place, ranks in places.items()}
    where = "; ".join(f"{ranks}, {place}" for place, ranks in who.items())
    nobody = "no rank has made progress" if len(accounts) == len(stages) else "no progress"
    return Cause(
        first, stages[first], f"{nobody} for {accounts[first].seconds:g} s: {where}"[:_MOST_TEXT], stood_still=True
    )


def account_of(thread: int, seconds: float) -> Standstill | None:
    """The account of a thread that has made no progress; None where a debugger holds it, or it has ended."""
    frames = list(_frames(thread))
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    if not frames or any(name.partition(".")[0] in _DEBUGGERS for name in names):
        return None
    caller = next((name for name in names if _top(name) not in sys.stdlib_module_names), "")
    waits = caller.startswith(_WAITS)
    return Standstill(seconds, _place(frames, names), waits)


def stack_of(thread: int) -> str:
    """The Python stack of a thread, the innermost call last."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


def is_writing(thread: int) -> bool:
    """Whether a thread writes a checkpoint, or waits for one that is written in the background."""
    return any(str(frame.f_globals.get("__name__", "")).startswith(_SAVES) for frame in _frames(thread))


def _frames(thread: int) -> Iterator[FrameType]:
    """From the innermost on."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frames: Sequence[FrameType], names: Sequence[str]) -> str:
    frame = next((frame for frame, name in zip(frames, names) if _is_users(frame, name)), frames[0])
    line = f"({frame.f_code.co_filename}, line {frame.f_lineno})"
    if not any(name in _LOADERS for name in names):
        return f"in {frame.f_code.co_name} {line}"
    whose = next((_LOOPS[name] for name in names if name in _LOOPS), "a")
    return f"waiting in {whose} loader {line}"


def _is_users(frame: FrameType, name: str) -> bool:
    parts = Path(frame.f_code.co_filename).parts
    is_installed = "site-packages" in parts or "dist-packages" in parts or frame.f_code.co_filename.startswith("<")
    return not is_installed and _top(name) not in _LIBRARIES and _top(name) not in sys.stdlib_module_names


def _top(name: str) -> str:
    return name.partition(".")[0]
