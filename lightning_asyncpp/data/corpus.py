"""The text files of a corpus: which they are, what they hold, and which are kept for validation."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from lightning_asyncpp.data.errors import DataError, check_listable, file_errors, printable

LIBRARIES = {"stdlib": "stdlib", "packages": "purelib"}
"""Name of a source -> what `sysconfig` calls its folder: the standard library, and what pip has installed."""
TEXT_PATTERNS = ("**/*.txt", "**/*.md", "**/*.rst", "**/*.py", "**/*.tex", "**/*.html", "**/*.json", "**/*.jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class TextFile:
    """One document of a corpus."""

    path: Path
    """Where the file is."""
    name: str
    """Path relative to the corpus's folder, with forward slashes: the document's identity on every machine."""
    size: int
    """Length in bytes when the folder was listed."""
    sha256: str | None = None
    """Digest of what the file holds, in hexadecimal; ``None`` before :meth:`hashed`."""

    def draw(self, purpose: str) -> float:
        """A number in [0, 1) that depends only on the name and on what it is drawn for."""
        return int.from_bytes(hashlib.sha256(f"{purpose}:{self.name}".encode()).digest()[:6], "big") / 2**48

    def hashed(self) -> TextFile:
        """Read the file, and return the document with the digest of its content: others are no longer read as this one.

        1.1 s of processor time per GB, and 17 us per file: medians of five readings of 256 MiB and of 2000 files of
        5 kB, which were in memory already, on one core of an EPYC server.

        Raises:
            DataError: the file cannot be read.
        """
        return replace(self, sha256=hashlib.sha256(self._content()).hexdigest())

    def read(self) -> str:
        """Return the text.

        Raises:
            DataError: the file cannot be read, is not UTF-8 text, or holds something else than when it was hashed.
        """
        content = self._content()
        if self.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise DataError(
                f"{self.path} has changed while the text was prepared; prepare it again when nothing writes there"
            )
        mend = "remove it from the folder, or give `patterns` that leave it out"
        if b"\0" in content:
            raise DataError(f"{self.path} is not text: it holds NUL bytes; {mend}")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8 text (byte {error.start}: {error.reason}); "
                f"convert it (iconv -t UTF-8), {mend}"
            ) from error

    def _content(self) -> bytes:
        mend = "let this user read it (chmod), or give `patterns` that leave it out"
        with file_errors(str(self.path), "read", mend):
            return self.path.read_bytes()


def find_text_files(
    source: str | Path, patterns: Sequence[str] = TEXT_PATTERNS, max_bytes: int | None = None
) -> list[TextFile]:
    """List the documents of a corpus in an order that depends only on their names.

    Args:
        source: a folder, ``"stdlib"`` for the running Python's standard library, or ``"packages"`` for the packages
            that are installed beside it; both without tests.
        patterns: globs of the files to take, relative to the folder; of the two libraries it is the Python files that
            match. Hidden files and folders are left out.
        max_bytes: take documents, in their order, as long as they fit into so many bytes.

    Raises:
        DataError: ``source`` is no folder, holds no file to take, or cannot be read.
    """
    with file_errors(f"source={str(source)!r}", "read", "let this user read it (chmod), or name another source"):
        files = _listed(source, patterns)
    files.sort(key=lambda file: (file.draw("order"), file.name))
    return files if max_bytes is None else _within(files, max_bytes)


def _listed(source: str | Path, patterns: Sequence[str]) -> list[TextFile]:
    library = LIBRARIES.get(str(source))
    if library is not None and Path(source).is_dir():
        raise DataError(f"source={source!r} is a name, and there is a folder of that name: for that write './{source}'")
    folder = Path(source).expanduser() if library is None else Path(sysconfig.get_path(library))
    if folder.is_file():
        raise DataError(
            f"source={str(source)!r} is a file, and a folder of text files is wanted; "
            f"give source={str(folder.parent)!r} with patterns={[folder.name]} to take this file alone"
        )
    if not folder.is_dir():
        raise DataError(
            f"source={str(source)!r}: there is no such folder; give a folder of text files, one that "
            "`asyncpp prepare` wrote, 'stdlib', or 'packages'"
        )
    if library is not None:
        patterns = [pattern for pattern in patterns if pattern.endswith(".py")]
    if library is None:
        split = [Path(pattern).parts for pattern in patterns]
        mend = "let this user read it (chmod), or give `patterns` that leave it out"
        with file_errors(f"source={str(source)!r}", "read", mend):
            check_listable(folder, lambda parts: any(_may_be_below(parts, pattern) for pattern in split))
    files = _matching_files(folder, patterns, _NOT_LIBRARY if library else set())
    if not files:
        raise DataError(f"{folder} holds no text file that matches {list(patterns)}; add files, or set `patterns`")
    return files


def _may_be_below(folder: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether files that match a pattern may be in a folder; both by their parts below the corpus's folder."""
    if not folder or (pattern and pattern[0] == "**"):
        return True
    return len(pattern) > 1 and fnmatchcase(folder[0], pattern[0]) and _may_be_below(folder[1:], pattern[1:])


def split_files(files: Sequence[TextFile], val_fraction: float) -> tuple[list[TextFile], list[TextFile]]:
    """Divide documents into those to train on and those to validate on, by a hash of their names.

    A document stays on its side when others come and go, except that neither side is left empty.
    """
    if not files:
        raise DataError("there are no files to divide")
    if val_fraction > 0 and len(files) < 2:
        raise DataError(
            f"{files[0].path} is the only file, and the split is by file; "
            "cut it into several, or set val_fraction=0 for no validation"
        )
    draws = {file: file.draw("split") for file in files}
    validation = {file for file in files if draws[file] < val_fraction}
    if val_fraction > 0 and not validation:
        validation = {min(files, key=lambda file: draws[file])}
    elif len(validation) == len(files):
        validation.remove(max(files, key=lambda file: draws[file]))
    return [file for file in files if file not in validation], [file for file in files if file in validation]


def _matching_files(folder: Path, patterns: Sequence[str], left_out: set[str]) -> list[TextFile]:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    files = []
    for path in paths:
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if hidden or left_out.intersection(parts) or not path.is_file():
            continue
        files.append(TextFile(path, _name("/".join(parts), folder), path.stat().st_size))
    return files


def _name(name: str, folder: Path) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{printable(name)} in {printable(str(folder))}: the name of this file is not UTF-8, and the order and the "
            "split go by names; rename it, or give `patterns` that leave it out"
        ) from error
    return name


def _within(files: Sequence[TextFile], max_bytes: int) -> list[TextFile]:
    taken, total = [], 0
    for file in files:
        if total + file.size <= max_bytes:
            taken.append(file)
            total += file.size
    if not taken:
        smallest = min(files, key=lambda file: file.size)
        raise DataError(f"max_bytes={max_bytes}: the smallest file, {smallest.path}, has {smallest.size} bytes already")
    return taken
