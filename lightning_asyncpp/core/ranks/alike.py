"""What every rank raises alike: rank 0 shows it in full, where users look, and the others in a line."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)
TRACEBACK = "ASYNCPP_TRACEBACK"
"""Environment variable: anything but nothing has every rank show its traceback."""
_MARK = "_asyncpp_alike"
_MOST = 100
_PRINT_ALONE = ("sys", "torch.")  # modules whose hooks print, and do nothing else


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
    """Whether all ranks raise it."""
    return hasattr(error, _MARK)


def _show(
    before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    rank = getattr(error, _MARK, None)
    if rank is None:
        before(kind, error, trace)
        return
    said = textwrap.shorten(str(error), _MOST, placeholder=" ...")
    sys.stderr.write(f"[rank{rank}]: as on rank 0, {kind.__name__}: {said}\n")  # at once: other ranks write as well
