"""What went wrong first, on whichever rank: what all ranks are told, and how they say it."""

from __future__ import annotations

import json
import textwrap
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass

from lightning_asyncpp.errors import ProtocolError

_MARK = "_asyncpp_cause"
MAX_LINE = 1000
"""Characters of an error in one line that others are told."""
MAX_TRACE = 2**14
"""Characters of its traceback that others are told: the last ones."""


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong.

    Attributes:
        rank: where.
        stage: of that rank.
        what: in one line: the error, or why the rank is thought to be gone.
        trace: the traceback of the error; empty for a rank that is gone.
    """

    rank: int
    stage: int
    what: str
    trace: str = ""

    @classmethod
    def raised(cls, rank: int, stage: int, error: BaseException) -> Cause:
        """An error of that rank; it may have been raised or not."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        if len(trace) > MAX_TRACE:
            trace = f"...\n{trace[-MAX_TRACE:]}"
        text = "".join(traceback.format_exception_only(type(error), error))
        return cls(rank, stage, textwrap.shorten(text, MAX_LINE, placeholder=" ..."), trace)

    @property
    def is_error(self) -> bool:
        """Whether the rank raised something; else it is gone."""
        return bool(self.trace)

    @property
    def line(self) -> str:
        """It in one line."""
        return f"rank {self.rank} (stage {self.stage}) {'failed first: ' if self.is_error else 'is gone: '}{self.what}"

    @property
    def text(self) -> str:
        """It as a whole."""
        return f"{self.line}\n\n{textwrap.indent(self.trace, '    ')}" if self.is_error else self.line

    def pack(self) -> bytes:
        """It as others receive it: JSON."""
        return json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace")

    @classmethod
    def unpack(cls, data: bytes) -> Cause:
        """Read what :meth:`pack` wrote.

        Raises:
            ProtocolError: it did not write this.
        """
        try:
            read = json.loads(data)
            cause = cls(**read)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"this is no account of an error: {error!r}") from None
        kinds = {"rank": int, "stage": int, "what": str, "trace": str}
        if not all(type(getattr(cause, name)) is kind for name, kind in kinds.items()):
            raise ProtocolError(f"this is no account of an error: {textwrap.shorten(str(read), 200)}")
        return cause


def mark(error: BaseException, cause: Cause) -> None:
    """Note on an error what went wrong first: whoever holds the error otherwise would keep its frames alive."""
    with suppress(AttributeError, TypeError):  # a class of errors with slots, or of a C extension
        setattr(error, _MARK, cause)


def cause_of(error: BaseException | None) -> Cause | None:
    """What is noted on an error, or on the one that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(cause := getattr(error, _MARK, None), Cause):
            return cause
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
