"""The files that a preparation reads, here or on the Hugging Face Hub at one commit, and the documents in them."""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_asyncpp.data.errors import DataError, check_listable, file_errors
from lightning_asyncpp.data.hub import HUB, hub_endpoint, hub_errors, hub_package

PARQUET = (".parquet",)
LINES = (".jsonl", ".ndjson")
COMPRESSED_LINES = tuple(f"{ending}{packed}" for ending in (".jsonl", ".ndjson", ".json") for packed in (".gz", ".zst"))
ENDINGS = (*PARQUET, *LINES, *COMPRESSED_LINES)
_BLOCK_BYTES = 4 * 2**20  # read ahead of what is asked of the hub
_ROWS = 1024
_TEXT_BYTES = 4 * 2**20
_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class SourceFile:
    """A file of documents."""

    url: str
    """Absolute path, or ``hf://`` URL with the commit."""
    size: int
    """Length in bytes."""
    stamp: int = 0
    """Time of the last change in nanoseconds; 0 on the hub, where the commit says it."""

    @property
    def on_hub(self) -> bool:
        """Whether the file is read over the network."""
        return self.url.startswith(HUB)

    @property
    def is_parquet(self) -> bool:
        """Whether the file is parquet; else it holds a JSON object per line."""
        return self.url.endswith(PARQUET)

    @property
    def is_compressed(self) -> bool:
        """Whether the file has to be read from its beginning."""
        return self.url.endswith(COMPRESSED_LINES)

    @property
    def damage(self) -> tuple[type[Exception], ...]:
        """What is raised where the content is damaged; of a file on the hub, an OSError may be the network's."""
        import pyarrow

        certain = (pyarrow.ArrowException, UnicodeDecodeError, zlib.error, gzip.BadGzipFile)
        return certain if self.on_hub else (*certain, EOFError, OSError)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading; ranges of a file on the hub are fetched as they are read.

        Raises:
            HubError: the network failed, here or while the file was read.
        """
        if not self.on_hub:
            with Path(self.url).open("rb") as opened:
                yield opened
            return
        with (
            hub_errors(self.url, "run the same command later"),
            _hub_file_system(hub_endpoint()).open(self.url, "rb", block_size=_BLOCK_BYTES) as opened,
        ):
            yield opened


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


def in_one_line(error: Exception) -> str:
    """What an exception says, without the line breaks of some libraries."""
    return " ".join(str(error).split())


def find_files(sources: Iterable[str]) -> list[SourceFile]:
    """List the files of all sources, in the order of the sources and by name in each; none comes twice.

    Raises:
        DataError: names every source that holds nothing to read, or the same documents in two formats.
    """
    found: dict[str, SourceFile] = {}
    problems: list[str] = []
    for source in sources:
        try:
            files = _hub_files(source) if source.startswith(HUB) else _local_files(source)
            _check(source, files)
        except DataError as error:
            problems.append(str(error))
            continue
        for file in files:
            found.setdefault(file.url, file)
    if problems:
        raise DataError("\n".join(problems))
    return list(found.values())


def changes(sources: Iterable[str], before: Iterable[SourceFile], times: bool = True) -> list[str]:
    """List the files of this machine that have changed, come or gone; those of the hub belong to a commit.

    Args:
        sources: what was asked for.
        before: the files that were found then.
        times: whether a file has changed if nothing but the time of its last change has.

    Raises:
        DataError: as :func:`find_files`.
    """
    now = find_files(source for source in sources if not source.startswith(HUB))
    was = (file for file in before if not file.on_hub)
    known = [{file if times else replace(file, stamp=0) for file in files} for files in (now, was)]
    return sorted({file.url for file in known[0] ^ known[1]})


def _check(source: str, files: Sequence[SourceFile]) -> None:
    if not files:
        raise DataError(f"{source}: holds no file that ends in {', '.join(ENDINGS)}; correct the path or the glob")
    kinds = {file.is_parquet for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{source}: holds parquet and JSON lines, maybe the same documents twice; "
            "give a glob for one of them, for instance *.parquet"
        )
    if empty := [file.url for file in files if file.size == 0]:
        raise DataError(f"{source}: {', '.join(empty)} has no content; copy it again, or remove it")


def _local_files(source: str) -> list[SourceFile]:
    with file_errors(source, "read", "let this user read it (chmod), or give a glob that leaves it out"):
        return _found(Path(source).expanduser())


def _found(path: Path) -> list[SourceFile]:
    if path.is_dir():
        check_listable(path)
        inside = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
        paths = [file for file in inside if file.name.endswith(ENDINGS) and file.is_file()]
    elif path.exists():
        paths = [path] if path.name.endswith(ENDINGS) else []
    else:
        matching = (Path(name) for name in glob.glob(str(path), recursive=True))
        paths = [file for file in matching if file.name.endswith(ENDINGS) and file.is_file()]
    return [_local(file.absolute()) for file in sorted(paths, key=str)]


def _local(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(str(path), status.st_size, status.st_mtime_ns)


def _hub_files(source: str) -> list[SourceFile]:
    """List files of the hub at the commit that the revision has now, so that a resumed run reads the same."""
    offline = _how_to_copy(source)
    with hub_errors(source, offline):
        system = _hub_file_system(hub_endpoint())
        resolved = system.resolve_path(source)
        information = hub_package().HfApi(hub_endpoint()).repo_info(
            resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision
        )  # fmt: skip
        pinned = f"{resolved.repo_type}s/{resolved.repo_id}@{information.sha}/{resolved.path_in_repo}".rstrip("/")
        patterned = bool(set("*?[") & set(resolved.path_in_repo))
        listed: dict[str, Any] = (system.glob if patterned else system.find)(pinned, detail=True)
        # Of a single file, huggingface_hub 1 says nothing here.
        listed = {name: entry or system.info(name) for name, entry in listed.items()}
    files = [
        SourceFile(f"{HUB}{name}", int(entry["size"]))
        for name, entry in listed.items()
        if entry["type"] == "file" and name.endswith(ENDINGS)
    ]
    return sorted(files, key=lambda file: file.url)


def _how_to_copy(source: str) -> str:
    """Say how files of the hub come to a machine without internet; ``source`` is ``hf://datasets/OWNER/NAME/...``."""
    owner, name, *inside = [*source.removeprefix(HUB).removeprefix("datasets/").split("/"), "", ""][:-1]
    pattern = "/".join(part for part in inside if part)
    if not pattern.endswith(ENDINGS):
        pattern = f"{pattern}/*" if pattern else "*"
    repository = f"{owner}/{name.partition('@')[0]}"
    return (
        f"without internet, run `hf download {repository} --repo-type dataset --include '{pattern}' --local-dir DIR` on"
        " a machine that has it, copy DIR here, and give it as the source"
    )


@lru_cache(maxsize=1)
def _hub_file_system(endpoint: str) -> Any:
    return hub_package().HfFileSystem(endpoint=endpoint)


@dataclass
class Documents:
    """Some documents of a span, in their order."""

    texts: list[str] = field(default_factory=list)
    """Texts that are not empty."""
    empty: int = 0
    """Documents without text among them, which are left out."""
    size: int = 0
    """Bytes of the source that were read for them; all of a span's make up its ``size``."""

    def add(self, text: str | None) -> None:
        """Take a document."""
        if text:
            self.texts.append(text)
        else:
            self.empty += 1


def read_documents(file: SourceFile, span: Span, text_key: str) -> Iterator[Documents]:
    """Read the documents of a span, some at a time.

    Args:
        file: the file that the span is of.
        span: the row groups or bytes.
        text_key: column or field with the text.

    Raises:
        DataError: what is read is no text; the message names the file and the place.
    """
    return _read_rows(file, span, text_key) if file.is_parquet else _read_lines(file, span, text_key)


def _read_rows(file: SourceFile, span: Span, text_key: str) -> Iterator[Documents]:
    import pyarrow.parquet

    with file.open() as opened, pyarrow.parquet.ParquetFile(opened, pre_buffer=file.on_hub) as parquet:
        groups = list(range(span.start, span.stop))
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        some = max(1, min(_ROWS, _TEXT_BYTES * rows // span.size))  # fewer of long documents
        done = 0
        try:
            for batch in parquet.iter_batches(batch_size=some, row_groups=groups, columns=[text_key]):
                seen = done + batch.num_rows
                documents = Documents(size=span.size * seen // rows - span.size * done // rows)
                for text in batch.column(0).to_pylist():
                    documents.add(text)
                done = seen
                yield documents
        except file.damage as error:
            place = f"{file.url}, row groups {span.start} to {span.stop - 1}, after row {done} of them"
            raise DataError(
                f"{place}: damaged, or no UTF-8 text ({in_one_line(error)}); copy the file again"
            ) from error


def _read_lines(file: SourceFile, span: Span, text_key: str) -> Iterator[Documents]:
    with ExitStack() as stack:
        raw = stack.enter_context(file.open())
        lines = _unpacked_lines(file, raw, stack) if file.is_compressed else _lines_between(raw, span, stack)
        documents = Documents()
        counted = length = number = 0
        try:
            for place, line, position in lines:
                number += 1
                if line.strip():
                    documents.add(_text(line, text_key, f"{file.url}, {place}"))
                length += len(line)
                if len(documents.texts) >= _ROWS or length >= _TEXT_BYTES:
                    documents.size = min(position, span.size) - counted
                    counted, length = min(position, span.size), 0
                    yield documents
                    documents = Documents()
        except file.damage as error:
            raise DataError(
                f"{file.url}, after line {number}: cut off or damaged ({in_one_line(error)}); copy it again"
            ) from error
        documents.size = span.size - counted
        yield documents


def _lines_between(raw: BinaryIO, span: Span, stack: ExitStack) -> Iterator[tuple[str, bytes, int]]:
    """Yield the lines that begin in the span: the place, the line, and the bytes of the span that were read so far."""
    reader = stack.enter_context(io.BufferedReader(cast(Any, raw), _BUFFER_BYTES))
    position = span.start
    if span.start:
        reader.seek(span.start - 1)
        position += len(reader.readline()) - 1  # the rest of a line that began before, or its end alone
    while position < span.stop:
        line = reader.readline()
        if not line:
            return
        begin, position = position, position + len(line)
        yield f"byte {begin}", line, position - span.start


def _unpacked_lines(file: SourceFile, raw: BinaryIO, stack: ExitStack) -> Iterator[tuple[str, bytes, int]]:
    """Yield the lines of a compressed file: the place, the line, and the compressed bytes that were read so far."""
    unpacked: Any
    if file.url.endswith(".gz"):
        unpacked = gzip.GzipFile(fileobj=raw)
    else:
        import pyarrow

        unpacked = io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    stack.enter_context(unpacked)
    for number, line in enumerate(unpacked, start=1):
        yield f"line {number}", line, raw.tell()


def _text(line: bytes, text_key: str, place: str) -> str | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no valid JSON ({error}); each line must hold one object") from error
    if not isinstance(document, dict):
        raise DataError(f"{place}: holds {type(document).__name__} and no object; each line must hold one object")
    if text_key not in document:
        raise DataError(f"{place}: has no field {text_key!r}; give --text-key, one of {', '.join(document)}")
    text = document[text_key]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{place}: field {text_key!r} holds {type(text).__name__} and no text; give another --text-key")
    return None if text is None else _well_formed(text)


def _well_formed(text: str) -> str:
    # JSON can write half a character ("\ud83d"), which is no text: it becomes U+FFFD.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
