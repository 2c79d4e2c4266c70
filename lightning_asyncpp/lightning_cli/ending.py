"""How the command ends where something is wrong: with what is wrong, in a line or two.

The traceback of a refusal of this package says nothing to its user: it is shown if it is asked for. Errors of other
code keep theirs.
"""

from __future__ import annotations

import dis
import os
import sys
import textwrap
from typing import NoReturn

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_asyncpp.core.ranks.agreement import TRACEBACK, is_alike
from lightning_asyncpp.errors import ConfigurationError, PeerLostError

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
    if type(error).__module__.startswith(_PACKAGE) or (isinstance(error, _ARGUMENTS) and is_refusal(error)):
        code = 2 if isinstance(error, _ARGUMENTS) else 1
        if is_alike(error) and _rank():
            _end(_shortened(str(error)), code)
        _end(f"{error}\n({TRACEBACK}=1 shows where)", code)


def refuse(error: ConfigurationError) -> NoReturn:
    """End with what is wrong; where it was found, among Lightning's frames and on every rank, would hide it."""
    _end(_shortened(str(error)) if _rank() else str(error), 2)  # they all raise the same


def is_refusal(error: BaseException) -> bool:
    """Whether code of this package raised an error by a statement, rather than that Python did as it ran."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not str(trace.tb_frame.f_globals.get("__name__")).startswith(_PACKAGE):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 100, placeholder=" ...")


def _end(text: str, code: int) -> NoReturn:
    rank = f"[rank {_rank()}] " if _rank() else ""
    sys.stderr.write(f"asyncpp: error: {rank}{text}\n")  # at once: other ranks write as well
    sys.exit(code)


def _rank() -> int:
    return getattr(rank_zero_only, "rank", None) or 0
