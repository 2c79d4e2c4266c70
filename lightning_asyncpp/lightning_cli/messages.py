"""What the command says at its start and its end, on the standard error output; nothing heavy is imported."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import traceback
from typing import NoReturn

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_asyncpp.errors import TRACEBACK, ConfigurationError, PeerLostError, is_alike

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Whether this process was started by hand, or as the first of those that torchrun, Slurm or Lightning start."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def say(text: str) -> None:
    """Say what is done now, unless another process does."""
    if is_first_process():
        sys.stderr.write(f"asyncpp: {text}\n")
        sys.stderr.flush()


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say_what_is_logged() -> None:
    """Have what the package logs as information said as well, as by the data that are prepared."""
    logger = logging.getLogger("lightning_asyncpp")
    if logger.handlers or logger.level:
        return  # whoever called this has chosen
    logger.addHandler(_Said())
    logger.setLevel(logging.INFO)


_PACKAGE = "lightning_asyncpp."
_ARGUMENTS = (ValueError, TypeError, ImportError)
"""What is raised where an argument is wrong, or a package is missing; also by Python."""


def end_with(error: Exception) -> None:
    """End the process with what the package refuses; return where the error is another, or its traceback is wanted.

    Raises:
        SystemExit: with code 2 where something else has to be asked for, with 1 for what went wrong as it ran.
    """
    if os.environ.get(TRACEBACK):
        return
    if isinstance(error, ConfigurationError):
        refuse(error)
    if isinstance(error, PeerLostError):
        _end(str(error) if not _rank() else str(error).partition("\n")[0], 1)
    if type(error).__module__.startswith(_PACKAGE) or (isinstance(error, _ARGUMENTS) and is_raised_by(error)):
        code = 2 if isinstance(error, _ARGUMENTS) else 1
        if is_alike(error) and _rank():
            _end(_shortened(str(error)), code)
        _end(f"{error}\n({TRACEBACK}=1 shows where)", code)


def refuse(error: Exception) -> NoReturn:
    """End with what is wrong; where it was found, among Lightning's frames and on every rank, would hide it."""
    _end(_shortened(str(error)) if _rank() else str(error), 2)  # they all raise the same


def is_raised_by(error: BaseException, package: str = _PACKAGE) -> bool:
    """Whether code of the package raised an error, and not code that it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(package)


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 100, placeholder=" ...")


def _end(text: str, code: int) -> NoReturn:
    rank = f"[rank {_rank()}] " if _rank() else ""
    sys.stderr.write(f"asyncpp: error: {rank}{text}\n")  # at once: other ranks write as well
    sys.exit(code)


def _rank() -> int:
    return getattr(rank_zero_only, "rank", None) or 0
