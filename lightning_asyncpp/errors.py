"""Errors of the pipeline."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, get_args

E = TypeVar("E", bound=Exception)
TRACEBACK = "ASYNCPP_TRACEBACK"
"""Environment variable; if not empty, every rank shows its traceback."""
_MARK = "_asyncpp_alike"
_SHOWN = 100  # characters of rank 0's error that other ranks repeat
_PRINT_ALONE = ("sys", "torch.")  # modules whose exception hooks only print
_PLACE = re.compile(r"\[[^\]]*\.cc:\d+\] ")  # file and line of gloo's source
_NOISE = re.compile(f"{_PLACE.pattern}|caused pair closure|Connection (closed|reset) by peer")
_OWN_DEVICE = re.compile("ncclUnhandledCudaError|Cuda failure|CUDA error")  # the device failed, or is out of memory


class ConfigurationError(ValueError):
    """Settings or calls that cannot work. Settings are refused before training, on every rank, with all problems."""

    @classmethod
    def from_problems(cls, problems: Sequence[str], remedy: str = "") -> ConfigurationError:
        """Return one error for all problems, so that one run shows them all.

        Args:
            problems: at least one problem.
            remedy: advice for all problems. It is appended to a single problem, and follows a list of several.
        """
        if len(problems) == 1:
            return cls("; ".join([*problems, remedy] if remedy else problems))
        lines = [f"{len(problems)} problems:", *(f"  {i}. {p}" for i, p in enumerate(problems, 1))]
        return cls("\n".join([*lines, remedy[:1].upper() + remedy[1:]] if remedy else lines))


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse an argument that is none of the values of ``choices``, a ``Literal``.

    Raises:
        ConfigurationError: it is none of them.
    """
    if value not in get_args(choices):
        raise ConfigurationError(f"{name}={value!r}: must be {' or '.join(map(repr, get_args(choices)))}")


class DataError(ValueError):
    """Wrong data, or a request that the data cannot serve; the message names a file or an argument, and a remedy."""


class BatchMismatchError(RuntimeError):
    """Different batches on the first and the last stage of a replica."""


class ProtocolError(RuntimeError):
    """Message from another rank that does not have the expected form."""


class ConsequenceError(RuntimeError):
    """Failure of this rank that another rank's failure caused."""


class PeerLostError(ConsequenceError):
    """Loss of the connection to another rank.

    Attributes:
        peer: the lost rank, if known.
    """

    peer: str | None = None


class NonFiniteGradientError(RuntimeError):
    """Mini-batch whose gradient has NaN or infinite entries."""


class lost_peers:  # noqa: N801 - used like a function; a `@contextmanager` generator would cost more per message
    """Translate an error of a broken connection into a :class:`PeerLostError`.

    Errors of another kind pass unchanged. If this rank's device fails while the rank packs or awaits a message (out of
    memory, or an earlier kernel failed), that is a first cause, not a consequence of another rank's failure, and no
    other rank must be blamed.

    Raises:
        PeerLostError: instead of torch.distributed's RuntimeError.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if (
            isinstance(error, Exception)
            and is_noise(error)
            and not isinstance(error, (ConsequenceError, ProtocolError))
        ):
            raise peer_lost(None, error) from None


def peer_lost(who: str | None, error: BaseException) -> PeerLostError:
    """Return the error for a broken connection to rank ``who``; None stands for an unknown rank."""
    lost = PeerLostError(
        f"{who or 'a rank'} is gone: its process was killed, crashed, was stopped, or ended before this rank's, perhaps"
        f" because it skipped a call that every rank must make ({_essence(error)})"
    )
    lost.peer = who
    return lost


def different_calls(what: str) -> ProtocolError:
    """Return the error for a valid message of another collective call than this rank's.

    Args:
        what: the expected and the received message.
    """
    return ProtocolError(
        f"ranks are in different calls: {what}. Some ranks skipped a collective call, or made it in another order. Such"
        " calls are fabric.save, trainer.save_checkpoint, strategy.drain, evaluation_step and clip_gradients, often"
        ' under an "if" on the rank, or in a loop over fewer batches than on other ranks. Make the same calls on all'
        " ranks"
    )


def different_ends(ended: str, going_on: str, k: int) -> ProtocolError:
    """Return the error for two neighbouring stages of which only one has a further batch.

    Args:
        ended: rank without a further batch.
        going_on: rank with a further batch.
        k: first microbatch of that batch.
    """
    return ProtocolError(
        f"{ended} has ended before microbatch {k} (its epoch or an evaluation ended, or it finishes what is in"
        f" flight for a validation or a checkpoint), while {going_on} has a further batch. Usually the data loaders"
        " have different numbers of batches on these ranks: all ranks of a replica must read the same data. Other"
        " causes: on one rank only, a hook or a dataset raised StopIteration, which ends the epoch in Lightning, or a"
        " hook set trainer.should_stop; or only some ranks call trainer.save_checkpoint, fabric.save, strategy.drain or"
        ' evaluation_step, often under an "if" on the rank'
    )


def is_noise(error: BaseException) -> bool:
    """Return whether an error only reports that a process group's connection broke, and not why.

    Such an error has a class of torch.distributed, or a message of gloo about a connection. All other errors say why,
    and so do NCCL's errors about this rank's device.
    """
    import torch.distributed as dist  # not at the top, since help screens import this module without torch

    if isinstance(error, dist.DistError):
        return not _OWN_DEVICE.search(str(error))
    return isinstance(error, RuntimeError) and bool(_NOISE.search(str(error)))


def _essence(error: BaseException) -> str:
    """Return gloo's message without its source location and its advice."""
    return _PLACE.sub("", str(error)).partition(". This is typically caused")[0]


def raised_alike(error: E, rank: int) -> E:
    """Mark an error that all ranks raise, so that only rank 0 shows it in full; return the error.

    On ranks above 0 this replaces ``sys.excepthook``, unless the present hook does more than print.

    Args:
        error: error of this rank.
        rank: this rank.
    """
    with suppress(AttributeError, TypeError):  # an error class with slots, or of a C extension
        setattr(error, _MARK, rank)
    before = sys.excepthook
    if rank and not os.environ.get(TRACEBACK) and before.__module__.startswith(_PRINT_ALONE):
        sys.excepthook = partial(_show, before)  # only once: the new hook's module is functools
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
    text = textwrap.shorten(str(error), _SHOWN, placeholder=" ...")
    sys.stderr.write(
        f"[rank{rank}]: as on rank 0, {kind.__name__}: {text}\n"
    )  # in one call, since ranks write at the same time
