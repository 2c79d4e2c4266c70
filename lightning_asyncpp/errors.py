"""The errors of the pipeline, each with the question that it answers."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)
TRACEBACK = "ASYNCPP_TRACEBACK"
"""Environment variable: anything but nothing has every rank show its traceback."""
_MARK = "_asyncpp_alike"
_SHOWN = 100  # characters of an error that another rank shows
_PRINT_ALONE = ("sys", "torch.")  # modules whose hooks print, and do nothing else
_PLACE = re.compile(r"\[[^\]]*\.cc:\d+\] ")  # in gloo's source
_NOISE = re.compile(f"{_PLACE.pattern}|caused pair closure|Connection (closed|reset) by peer")
_OWN_DEVICE = re.compile("ncclUnhandledCudaError|Cuda failure|CUDA error")  # NCCL found it broken, or without memory


class ConfigurationError(ValueError):
    """Can this run at all? Raised before training, on every rank, with every problem that was found."""

    @classmethod
    def from_problems(cls, problems: Sequence[str], remedy: str = "") -> ConfigurationError:
        """Join all problems into one error, so that nobody meets them one run at a time.

        Args:
            problems: at least one.
            remedy: what there is to say about all of them: after a single one, or on a line of its own.
        """
        if len(problems) == 1:
            return cls("; ".join([*problems, remedy] if remedy else problems))
        lines = [f"{len(problems)} problems:", *(f"  {i}. {p}" for i, p in enumerate(problems, 1))]
        return cls("\n".join([*lines, remedy[:1].upper() + remedy[1:]] if remedy else lines))


class DataError(ValueError):
    """The data, or what was asked of it, is wrong; the message names the file or the argument, and what would work."""


class BatchMismatchError(RuntimeError):
    """Do the first and the last stage of a replica see the same batch?"""


class ProtocolError(RuntimeError):
    """Does what arrived from a neighbour have the form that was agreed on?"""


class ConsequenceError(RuntimeError):
    """Did this rank fail because another one did?"""


class PeerLostError(ConsequenceError):
    """Is the neighbour still there?

    Attributes:
        peer: who is gone, where that is known.
    """

    peer: str | None = None


class NonFiniteGradientError(RuntimeError):
    """Is the gradient of this mini-batch made of numbers?"""


class lost_peers:  # noqa: N801 - used as a function; a generator would cost more, around every message
    """Translate the errors of a broken connection into one that says who is gone and where to look.

    Everything else stays what it is: what this rank's device says while a message is packed or waited for (no memory,
    an error of a kernel that ran before) is a first cause, which must not be blamed on another rank.

    Args:
        who: who is gone; ``None``: some rank.

    Raises:
        PeerLostError: instead of torch.distributed's RuntimeError.
    """

    __slots__ = ("who",)

    def __init__(self, who: str | None = None) -> None:
        self.who = who

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if (
            isinstance(error, Exception)
            and is_noise(error)
            and not isinstance(error, (ConsequenceError, ProtocolError))
        ):
            raise peer_lost(self.who, error) from None


def peer_lost(who: str | None, error: BaseException) -> PeerLostError:
    """The error to raise where a connection broke, with somebody or, if it is not known with whom, with some rank."""
    lost = PeerLostError(
        f"{who or 'a rank'} is gone: its process was killed, crashed, was stopped, or ended before this rank's, perhaps"
        f" without a call that every rank has to make ({_essence(error)})"
    )
    lost.peer = who
    return lost


def different_calls(what: str) -> ProtocolError:
    """The error to raise where a rank sent something that is sound, but of another call than this rank's.

    Args:
        what: what was expected, and what came.
    """
    return ProtocolError(
        f"ranks are in different calls: {what}. A collective call was made by some ranks only, or in another order:"
        ' usually fabric.save, trainer.save_checkpoint, strategy.flush or evaluation_step behind an "if" that asks for'
        " the rank, clip_gradients, or a loop over another number of batches; let all ranks make the same calls"
    )


def different_ends(ended: str, going_on: str, k: int) -> ProtocolError:
    """The error to raise where one of two neighbours runs a further batch, and the other does not.

    Args:
        ended: who does not.
        going_on: who does.
        k: the batch's first microbatch.
    """
    return ProtocolError(
        f"{ended} has ended before microbatch {k} (its epoch or an evaluation, or it finishes what is in flight for a"
        f" validation or a checkpoint), while {going_on} has a further batch. Usually the data loaders have different"
        " numbers of batches on these ranks: all ranks of a replica must read the same data. Or a hook or a dataset"
        " raised StopIteration on one rank alone, which Lightning takes for the end of the epoch; or"
        ' trainer.save_checkpoint, fabric.save, strategy.flush or evaluation_step stands behind an "if" that asks for'
        " the rank"
    )


def is_noise(error: BaseException) -> bool:
    """Return whether an error reports a broken connection of a process group, which does not tell why it broke.

    Recognised by where it comes from: torch.distributed's own classes, or the place in gloo's source that gloo puts
    into what it raises. An error of any other origin, and NCCL's about this rank's own device, is somebody's mistake.
    """
    import torch.distributed as dist  # here: who only names these errors, as for a help screen, does not wait for torch

    if isinstance(error, dist.DistError):
        return not _OWN_DEVICE.search(str(error))
    return isinstance(error, RuntimeError) and bool(_NOISE.search(str(error)))


def _essence(error: BaseException) -> str:
    """Return gloo's message without the place in its source before it and the advice after it."""
    return _PLACE.sub("", str(error)).partition(". This is typically caused")[0]


def raised_alike(error: E, rank: int) -> E:
    """Mark an error that all ranks raise, so that a script which it ends shows it once.

    On other ranks than 0 ``sys.excepthook`` is replaced, unless somebody has done so who may want to know of errors.

    Args:
        error: of this rank.
        rank: this one.

    Returns:
        The error.
    """
    with suppress(AttributeError, TypeError):  # a class of errors with slots, or of a C extension
        setattr(error, _MARK, rank)
    before = sys.excepthook
    if rank and not os.environ.get(TRACEBACK) and before.__module__.startswith(_PRINT_ALONE):
        sys.excepthook = partial(_show, before)  # its module is functools: it is not replaced again
    return error


def is_alike(error: BaseException | None) -> bool:
    """Return whether all ranks raise the error."""
    return hasattr(error, _MARK)


def _show(
    before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    rank = getattr(error, _MARK, None)
    if rank is None:
        before(kind, error, trace)
        return
    said = textwrap.shorten(str(error), _SHOWN, placeholder=" ...")
    sys.stderr.write(f"[rank{rank}]: as on rank 0, {kind.__name__}: {said}\n")  # at once: other ranks write as well
