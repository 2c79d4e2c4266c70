"""Reading documents: the text column of parquet files, a field of JSON lines."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.tools.prepare.files import SourceFile, in_one_line
from lightning_asyncpp.tools.prepare.plan import Span

_ROWS = 1024
_TEXT_BYTES = 4 * 2**20
_BUFFER_BYTES = 2**20


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
