"""Messages of the command on the standard error output; cheap to import."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_asyncpp.errors import TRACEBACK, ConfigurationError, PeerLostError, is_alike

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Return whether this is the first process of the run, under torchrun, Slurm or Lightning's launcher."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def say(text: str) -> None:
    """Print a message in the first process."""
    if is_first_process():
        sys.stderr.write(f"asyncpp: {text}\n")
        sys.stderr.flush()


class _SayHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say_what_is_logged() -> None:
    """Print the package's log messages from level INFO on, such as those on the preparation of data."""
    logger = logging.getLogger("lightning_asyncpp")
    if logger.handlers or logger.level:
        return  # the caller has configured the logger
    logger.addHandler(_SayHandler())
    logger.setLevel(logging.INFO)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, and log messages below errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


_PACKAGE = "lightning_asyncpp."
_ARGUMENTS = (ValueError, TypeError, ImportError)
"""Exceptions for wrong arguments and missing packages; code outside of this package raises them, too."""


def end_with(error: Exception) -> None:
    """End the process with a short message if this package raised the error; return if a traceback is to be shown.

    Raises:
        SystemExit: code 2 for wrong arguments, 1 for a failure of the run.
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
    """End the process with only the message; tracebacks through Lightning's frames on every rank would hide it."""
    _end(_shortened(str(error)) if _rank() else str(error), 2)  # all ranks raise the same error


def is_raised_by(error: BaseException, package: str = _PACKAGE) -> bool:
    """Return whether code of the package itself raised an error, and not code that it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(package)


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 100, placeholder=" ...")


def _end(text: str, code: int) -> NoReturn:
    rank = f"[rank {_rank()}] " if _rank() else ""
    sys.stderr.write(f"asyncpp: error: {rank}{text}\n")  # in one call, since other ranks write as well
    sys.exit(code)


def _rank() -> int:
    return getattr(rank_zero_only, "rank", None) or 0
