"""The plan of a preparation: which pieces of which files, in which order. It is made once and kept with the work.

A piece is what one process tokenises at a time: some row groups of a parquet file, a range of a file of lines, or
several small files. What becomes of a piece depends on nothing but the piece, so neither the number of processes nor
an interruption changes what is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.token_dataset import PLAN
from lightning_asyncpp.durable import replace_durably
from lightning_asyncpp.tools.prepare.files import SourceFile, in_one_line
from lightning_asyncpp.tools.prepare.request import Request

_FORMAT = 1
_FOOTERS_AT_A_TIME = 8
_FILES_AT_A_TIME = 64  # after which is asked whether they are enough
_TEXT = ("string", "large_string", "string_view")  # Arrow's names


@dataclass(frozen=True)
class Span:
    """A part of a file."""

    file: int
    """Index of the file in the plan."""
    start: int
    """First row group of a parquet file, first byte of others."""
    stop: int
    """Past the last."""
    size: int
    """Bytes of the source that it stands for: of the text in a parquet file, else of the file."""


Piece = tuple[Span, ...]


@dataclass(frozen=True)
class Plan:
    """What is read, in which pieces."""

    request: dict[str, Any]
    """The arguments that decide what is written."""
    files: tuple[SourceFile, ...]
    """The files, in their order."""
    pieces: tuple[Piece, ...]
    """The pieces, in their order."""

    @property
    def size(self) -> int:
        """Bytes of the source."""
        return sum(span.size for piece in self.pieces for span in piece)

    def write(self, folder: Path) -> None:
        """Write the plan into ``folder``, whole or not at all."""
        content = {
            "format": _FORMAT,
            "request": self.request,
            "files": [asdict(file) for file in self.files],
            "pieces": [[[span.file, span.start, span.stop, span.size] for span in piece] for piece in self.pieces],
        }
        temporary = folder / f"{PLAN}.{os.getpid()}"
        temporary.write_text(json.dumps(content))
        replace_durably(temporary, folder / PLAN)


def read_plan(folder: Path) -> Plan:
    """Read the plan of a work in progress.

    Raises:
        DataError: it is damaged, or of another release.
    """
    try:
        content = json.loads((folder / PLAN).read_text())
        if content["format"] != _FORMAT:
            raise DataError(
                f"{folder / PLAN} is of another release; delete {folder} to begin anew, or use that release"
            )
        files = tuple(SourceFile(**file) for file in content["files"])
        pieces = tuple(tuple(Span(*span) for span in piece) for piece in content["pieces"])
        return Plan(content["request"], files, pieces)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder / PLAN} is damaged ({error!r}); delete {folder} to begin anew") from error


def make_plan(request: Request, files: Sequence[SourceFile]) -> Plan:
    """Cut the files into pieces; of parquet files the footers are read, hardly further than ``max_mb`` reaches.

    Raises:
        DataError: names the files that cannot be read or have no such column, of 64 at a time.
    """
    pieces = list(_packed(_spans(request, files), request.piece_bytes))
    if request.max_mb is not None:
        pieces = _first(pieces, request.max_mb * 1e6)
    if not pieces:
        raise DataError(f"{', '.join(request.sources)}: there is not a single row to read")
    return Plan(request.content(), tuple(files), tuple(pieces))


def _spans(request: Request, files: Sequence[SourceFile]) -> list[Span]:
    cut = partial(_spans_or_problem, text_key=request.text_key, piece_bytes=request.piece_bytes)
    # A piece more than what is taken, so that the last one that is taken is what it would be among all.
    enough = float("inf") if request.max_mb is None else request.max_mb * 1e6 + request.piece_bytes
    spans: list[Span] = []
    with (
        ThreadPoolExecutor(_FOOTERS_AT_A_TIME) as pool,
        tqdm(total=len(files), desc="looking at files", unit="file", leave=False, delay=2.0, disable=None) as bar,
    ):
        for start in range(0, len(files), _FILES_AT_A_TIME):
            some = files[start : start + _FILES_AT_A_TIME]
            results = list(pool.map(cut, range(start, start + len(some)), some))
            if problems := [result for result in results if isinstance(result, str)]:
                raise DataError("\n".join(problems))
            spans += (span for result in results if not isinstance(result, str) for span in result)
            bar.update(len(some))
            if sum(span.size for span in spans) >= enough:
                break
    return spans


def _spans_or_problem(index: int, file: SourceFile, text_key: str, piece_bytes: int) -> list[Span] | str:
    try:
        if file.is_parquet:
            return _row_groups(index, file, text_key)
    except DataError as error:
        return str(error)
    if file.is_compressed:
        return [Span(index, 0, file.size, file.size)]
    starts = range(0, file.size, piece_bytes)
    stops = (min(start + piece_bytes, file.size) for start in starts)
    return [Span(index, start, stop, stop - start) for start, stop in zip(starts, stops)]


def _row_groups(index: int, file: SourceFile, text_key: str) -> list[Span]:
    import pyarrow
    import pyarrow.parquet

    with file.open() as opened:
        try:
            metadata = pyarrow.parquet.ParquetFile(opened).metadata
        except file.damage as error:
            told = f"{file.url} is no parquet file ({in_one_line(error)}); copy it again, or leave it out"
            raise DataError(told) from error
    types = {field.name: field.type for field in metadata.schema.to_arrow_schema()}
    if text_key not in types:
        raise DataError(f"{file.url} has no column {text_key!r}; give --text-key, one of {', '.join(types)}")
    kind = types[text_key]
    if str(kind) not in _TEXT:
        raise DataError(f"{file.url}: column {text_key!r} holds {kind} and no text; give another --text-key")
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    return [
        Span(index, group, group + 1, _column_bytes(content, text_key))
        for group, content in enumerate(groups)
        if content.num_rows
    ]


def _column_bytes(group: Any, name: str) -> int:
    columns = (group.column(index) for index in range(group.num_columns))
    return max(1, sum(int(column.total_uncompressed_size) for column in columns if column.path_in_schema == name))


def _packed(spans: Iterable[Span], piece_bytes: int) -> Iterator[Piece]:
    piece: list[Span] = []
    size = 0
    for span in spans:
        last = piece[-1] if piece else None
        if last is not None and (last.file, last.stop) == (span.file, span.start):
            piece[-1] = Span(last.file, last.start, span.stop, last.size + span.size)
        else:
            piece.append(span)
        size += span.size
        if size >= piece_bytes:
            yield tuple(piece)
            piece, size = [], 0
    if piece:
        yield tuple(piece)


def _first(pieces: Sequence[Piece], most: float) -> list[Piece]:
    taken: list[Piece] = []
    size = 0
    for piece in pieces:
        if size >= most:
            break
        taken.append(piece)
        size += sum(span.size for span in piece)
    return taken
