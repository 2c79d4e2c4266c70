"""What is raised when data cannot be used, and what errors of the file system become."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """The data, or what was asked of it, is wrong; the message names the file or the argument, and the mend."""


@contextmanager
def file_errors(what: str, done: str, mend: str) -> Iterator[None]:
    """Turn what the file system refuses into a :class:`DataError`; other errors that are OSErrors, too, pass.

    Args:
        what: argument or file, as the user gave it.
        done: what is tried, after "cannot be".
        mend: what would work.

    Raises:
        DataError: the file system refuses, a path is not UTF-8 where it has to be, or there is no home folder that
            ``~`` could stand for.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):  # of a client of the network
            raise
        named = "" if error.filename is None else f": {printable(str(error.filename))}"
        raise DataError(f"{what} cannot be {done} ({error.strerror}{named}); {mend}") from error
    except UnicodeEncodeError as error:  # of libraries that take no other paths
        raise DataError(f"{what} cannot be {done}: {printable(error.object)} is not UTF-8; {mend}") from error
    except RuntimeError as error:
        if "home directory" not in str(error):  # as pathlib says it
            raise
        raise DataError(
            f"{what} cannot be {done}: there is no home folder; set HOME to a folder that this user can write to, or"
            " name folders without it"
        ) from error


def check_listable(folder: Path, matters: Callable[[tuple[str, ...]], bool] = lambda _: True) -> None:
    """Find folders that nobody may list: `Path.glob` passes them by in silence. Hidden ones are left out.

    Args:
        folder: with all that is in it.
        matters: whether it does of a folder, by its parts below this one.

    Raises:
        OSError: of the first that matters.
    """

    def refuse(error: OSError) -> None:
        if matters(Path(error.filename).relative_to(folder).parts):
            raise error

    for _, names, _ in os.walk(folder, onerror=refuse):
        names[:] = [name for name in names if not name.startswith(".")]


def printable(path: str) -> str:
    """A path as it can be written anywhere, also if it is not UTF-8."""
    return path.encode("utf-8", "backslashreplace").decode()
