"""Where what is made of text, and what is streamed, is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from lightning_asyncpp.data.errors import DataError, file_errors
from lightning_asyncpp.data.source import default_cache_dir


def cache_dir_of(given: str | None) -> Path | None:
    """The folder for prepared datasets; ``None`` where the usual one is not known, which may never be asked for.

    Raises:
        DataError: the one that was given is in a home folder, and there is none.
    """
    if given is None:
        try:
            return default_cache_dir()
        except DataError:
            return None
    with file_errors(f"cache_dir={given!r}", "found", "name another folder"):
        return Path(given).expanduser()


def known(cache_dir: Path | None) -> Path:
    """The folder, where something is to be kept.

    Raises:
        DataError: it is the usual one, and there is no home folder.
    """
    return default_cache_dir() if cache_dir is None else cache_dir


def using(cache_dir: Path, done: str) -> AbstractContextManager[None]:
    """Turn what the file system refuses into a :class:`DataError` that names the argument."""
    return file_errors(f"cache_dir={str(cache_dir)!r}", done, "name another cache_dir")


def folder_for_stream(cache_dir: Path, rank: int) -> str:
    """Make and return the folder for the chunks that a process streams.

    Raises:
        DataError: it cannot be made.
    """
    # One folder per process: litdata deletes chunks behind a reader, and counts the other readers by world size,
    # where the other stages of a replica do not appear.
    folder = cache_dir / "streamed" / f"rank-{rank}"
    with using(cache_dir, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def wrong_cache_dir(cache_dir: Path | None) -> list[str]:
    """Why nothing can be kept there, as far as that is known before."""
    try:
        folder = known(cache_dir)
        with using(folder, "read"):
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if existing.is_dir():
                return []
    except DataError as error:  # to be said with others
        return [str(error)]
    return [f"cache_dir={str(folder)!r}: {existing} is no folder; remove it, or name another cache_dir"]
