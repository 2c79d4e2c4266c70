"""What a preparation is asked to do, and the plan made of it: which pieces of which files, in which order.

What is wrong with the arguments is said before anything is read. The plan is made once and kept with the work. A piece
is what one process tokenises at a time: some row groups of a parquet file, a range of a file of lines, or several small
files. What becomes of a piece depends on nothing but the piece, so neither the number of processes nor an interruption
changes what is written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.hub import HUB, is_hub_name
from lightning_asyncpp.data.token_dataset import PARTIAL, PLAN
from lightning_asyncpp.optional_packages import missing_packages, needed
from lightning_asyncpp.storage.durable import write_durably
from lightning_asyncpp.tools.prepare.source_files import SourceFile, Span, in_one_line

_DATASET = re.compile(re.escape(HUB) + "datasets/[^/]+/[^/]+")
_FORMAT = 1
_FOOTERS_AT_A_TIME = 8
_FILES_AT_A_TIME = 64  # after which is asked whether they are enough
_TEXT = ("string", "large_string", "string_view")  # Arrow's names


@dataclass(frozen=True)
class Request:
    """The arguments of ``asyncpp prepare``."""

    sources: tuple[str, ...]
    """Files, folders, globs, and URLs such as ``hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT``."""
    output: Path
    """Folder of the token shards; it exists only when they are complete."""
    tokenizer: str
    """``"byte"``, ``"bpe"``, the path of a tokenizer.json, or the name of a repository of models on the hub."""
    vocab_size: int | None = None
    """Number of token ids of a vocabulary to be trained (``"bpe"``)."""
    end_of_text: str | None = None
    """The token that ends a document; ``None`` for the tokenizer's usual one."""
    text_key: str = "text"
    """Column or field with the text."""
    val_fraction: float = 0.001
    """Share of the documents that are kept for validation."""
    num_workers: int = 0
    """Processes that tokenise; 0: this one."""
    piece_mb: float = 64.0
    """Megabytes of the source that are tokenised at a time, and lost at most per process by an interruption."""
    max_mb: float | None = None
    """Take pieces until they make so many megabytes of the source; ``None``: all."""

    @property
    def partial(self) -> Path:
        """Folder of the work in progress, beside the output."""
        return self.output.parent / (self.output.name + PARTIAL)

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether the tokenizer is no file of this machine that could change."""
        return self.tokenizer in ("byte", "bpe") or is_hub_name(self.tokenizer)

    @property
    def piece_bytes(self) -> int:
        """Bytes of the source in a piece."""
        piece_mb = self.piece_mb if self.max_mb is None else min(self.piece_mb, self.max_mb)
        return max(1, int(piece_mb * 1e6))

    def content(self) -> dict[str, Any]:
        """All that decides what is written. The number of processes does not."""
        return {
            "sources": [source if source.startswith(HUB) else str(_absolute(source)) for source in self.sources],
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "text_key": self.text_key,
            "val_fraction": self.val_fraction,
            "piece_mb": self.piece_mb,
            "max_mb": self.max_mb,
        }

    def problems(self) -> list[str]:
        """Say what is wrong with the arguments, each with its mend."""
        return [*self._wrong_numbers(), *self._wrong_tokenizer(), *self._wrong_places(), *self._missing_packages()]

    def _wrong_numbers(self) -> list[str]:
        problems = []
        if not 0 <= self.val_fraction < 1:
            problems.append(f"--val-fraction {self.val_fraction}: must be at least 0 and below 1")
        if self.num_workers < 0:
            problems.append(f"--num-workers {self.num_workers}: must be at least 0 (0: no further process)")
        for name, value in (("--piece-mb", self.piece_mb), ("--max-mb", self.max_mb)):
            if value is not None and not 0 < value < float("inf"):
                problems.append(f"{name} {value}: must be above 0 MB")
        if not self.text_key:
            problems.append("--text-key is empty; name the column or field with the text")
        return problems

    def _wrong_tokenizer(self) -> list[str]:
        problems = []
        if self.tokenizer == "bpe" and (self.vocab_size is None or self.vocab_size < 257):
            problems.append(f"--vocab-size {self.vocab_size}: --tokenizer bpe needs at least 257, the bytes and an end")
        if self.tokenizer != "bpe" and self.vocab_size is not None:
            problems.append(f"--vocab-size {self.vocab_size}: is for --tokenizer bpe, which is trained; leave it out")
        if self.tokenizer == "byte" and self.end_of_text is not None:
            problems.append(f"--end-of-text {self.end_of_text!r}: the byte tokenizer ends documents with byte 0")
        if not self.has_own_tokenizer and not _absolute(self.tokenizer).exists():
            problems.append(
                f"--tokenizer {self.tokenizer}: there is no such file; give byte, bpe, a tokenizer.json, or a name of "
                "the hub such as HuggingFaceTB/SmolLM-360M"
            )
        return problems

    def _wrong_places(self) -> list[str]:
        problems = [
            f"{source}: there is no such file or folder"
            for source in self.sources
            if not source.startswith(HUB) and not set("*?[") & set(source) and not _absolute(source).exists()
        ]
        problems += [
            f"{source}: is no place that can be read from; give a path, a glob, or {HUB}datasets/OWNER/NAME/FOLDER"
            for source in self.sources
            if "://" in source and not source.startswith(HUB)
        ]
        problems += [
            f"{source}: is no place of a dataset; give {HUB}datasets/OWNER/NAME, and a folder, file or glob if wanted"
            for source in self.sources
            if source.startswith(HUB) and not _DATASET.match(source)
        ]
        if not self.output.name or self.output.name == "..":
            return [*problems, f"--output {self.output}: name a folder that is to be made"]
        parents = (self.partial, *self.output.absolute().parents)
        existing = next(path for path in parents if path.exists())
        if not existing.is_dir():
            problems.append(f"--output {self.output}: {existing} is no folder; remove it, or name another output")
        elif not os.access(existing, os.W_OK):
            problems.append(f"--output {self.output}: {existing} cannot be written to; name another output")
        return problems

    def _missing_packages(self) -> list[str]:
        packages = {"pyarrow"}
        if any(source.startswith(HUB) for source in self.sources):
            packages.add("huggingface_hub")
        if self.tokenizer not in ("byte", "bpe") and is_hub_name(self.tokenizer):
            packages |= {"huggingface_hub", "tokenizers"}
        elif self.tokenizer != "byte":
            packages.add("tokenizers")
        missing = missing_packages(packages)
        return [needed("asyncpp prepare", missing, extra="prepare")] if missing else []


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


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
        write_durably(folder / PLAN, json.dumps(content).encode())


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
