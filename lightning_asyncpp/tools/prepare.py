"""``asyncpp prepare SOURCE... --output FOLDER``: tokenise documents into a dataset, with ``litdata.optimize``."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor

from lightning_asyncpp.data.corpus import Named, split
from lightning_asyncpp.data.token_dataset import CHUNK_BYTES, INDEX, finish_token_dataset, joined, token_groups
from lightning_asyncpp.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of_definition
from lightning_asyncpp.dependencies import optional_package
from lightning_asyncpp.errors import DataError
from lightning_asyncpp.tools.parsers import prepare_parser

_LINES = (".jsonl", ".ndjson")
_TEXT = (".txt", ".md")
ENDINGS = (".parquet", *_LINES, *(line + ".gz" for line in _LINES), *_TEXT)
_PIECES = 200  # number of pieces of a file of lines
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**24  # limits of their size
_REQUEST = ".prepared.json"


@dataclass(frozen=True)
class Piece(Named):
    """Part of a file that one worker tokenises at a time."""

    url: str
    start: int = 0
    """Number of a row group in a parquet file, or of the first byte in a file of lines."""
    stop: int = sys.maxsize
    """Number of the byte after the last one in a file of lines."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a dataset."""
    given = prepare_parser().parse_args(argv)
    tokenizer, output = load_tokenizer(given.tokenizer, given.end_of_text), Path(given.output).expanduser()
    prepare(given.sources, output, tokenizer, given.text_key, given.val_fraction, given.num_workers)


def prepare(
    sources: Sequence[str], output: Path, tokenizer: Tokenizer, text_key: str, val_fraction: float, num_workers: int
) -> None:
    """Write a token dataset, or resume an interrupted call with the same arguments.

    Args:
        sources: files, folders and globs, on this machine or as URLs that `fsspec` reads.
        output: folder of the dataset.
        tokenizer: tokenizer of the documents.
        text_key: column or field with the text.
        val_fraction: share of the pieces for validation.
        num_workers: number of processes; a resumed call has as many as the interrupted one.

    Raises:
        DataError: a source has no files or a wrong document, the share is wrong, or the folder was begun otherwise.
    """
    pieces = [piece for place, source in enumerate(sources) for piece in find_pieces(source, text_key, place)]
    splits = split(pieces, val_fraction)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers run in parallel already
    given = {"tokenizer": tokenizer.fingerprint, "text_key": text_key, "val_fraction": val_fraction}
    digest = hashlib.sha256(json.dumps([astuple(piece) for piece in pieces]).encode()).hexdigest()
    num_workers = _begin(output, {**given, "sources": digest}, num_workers)
    for name, chosen in zip(("train", "val"), splits):
        if chosen and not (output / name / INDEX).is_file():
            _write(output / name, chosen, partial(_tokens, tokenizer.definition, text_key), num_workers)
    found = finish_token_dataset(output, tokenizer)
    print(
        f"{output}: {found.train_tokens:,} tokens to train on, {found.val_tokens:,} to validate on. Train on it: --data"
        f" lightning_asyncpp.data.TextDataModule --data.source {output}, with a model of vocab_size={found.vocab_size}"
        " or more."
    )


def find_pieces(source: str, text_key: str, place: int = 0) -> list[Piece]:
    """List the pieces of a source, in the order of the files' names.

    Their names have paths relative to the source, so that they are the same on every machine.

    Args:
        source: file, folder, glob or URL.
        text_key: column or field with the text.
        place: number that tells the names from those of other sources.

    Raises:
        DataError: the source has no files, or a parquet file has no column ``text_key``.
    """
    system, path = fsspec.core.url_to_fs(os.path.expanduser(source))
    paths = system.glob(path) if set("*?[") & set(path) else system.find(path)
    paths = [found for found in sorted(paths) if found.endswith(ENDINGS)]
    if not paths:
        raise DataError(f"{source}: there is no file that ends in {', '.join(ENDINGS)}. Correct the path or the glob")
    names = [f"{place}:{os.path.relpath(found, path)}" for found in paths]
    with ThreadPoolExecutor(8) as pool:  # reading footers of parquet files over a network is slow
        return [piece for pieces in pool.map(partial(_pieces_of, system, text_key), paths, names) for piece in pieces]


def _pieces_of(system: Any, text_key: str, path: str, name: str) -> list[Piece]:
    url = system.unstrip_protocol(path)
    if path.endswith(".parquet"):
        with system.open(path) as file:
            opened = _parquet().ParquetFile(file)
            columns = opened.schema_arrow.names
            if text_key not in columns:
                raise DataError(f"{path} has no column {text_key!r}. Give --text-key, one of {', '.join(columns)}")
            return [Piece(f"{name}:{group}", url, group) for group in range(opened.num_row_groups)]
    if path.endswith(_LINES):
        size = system.size(path)
        step = min(max(size // _PIECES, _LEAST_BYTES), _MOST_BYTES)
        return [Piece(f"{name}:{start}", url, start, start + step) for start in range(0, size, step)]
    return [Piece(name, url)]


def read_documents(piece: Piece, text_key: str) -> Iterator[str]:
    """Yield the documents of a piece; a line belongs to the piece in which it begins.

    Raises:
        DataError: a document is not text; the message names the file and the first byte of the line.
    """
    where = piece.url
    try:
        with fsspec.open(piece.url, "rb", compression="infer") as file:
            if piece.url.endswith(".parquet"):
                table = _parquet().ParquetFile(file).read_row_group(piece.start, columns=[text_key])
                yield from map(_checked, filter(None, table.column(0).to_pylist()))
            elif piece.url.removesuffix(".gz").endswith(_LINES):
                if piece.start:
                    file.seek(piece.start - 1)
                    file.readline()
                while (byte := file.tell()) < piece.stop and (line := file.readline()):
                    where = f"{piece.url}, line at byte {byte},"
                    if line.strip() and (text := json.loads(line)[text_key]):
                        yield _checked(text)
            else:
                yield file.read().decode()
    except Exception as error:  # of any reader
        raise DataError(
            f"{where} cannot be read as text ({type(error).__name__}: {error}). Correct or remove it, or give another"
            f" --text-key than {text_key!r}"
        ) from error


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r:.50} is not text")
    return text


def _parquet() -> Any:
    return optional_package("pyarrow.parquet", "reading parquet files")


_tokenizer = lru_cache(maxsize=1)(tokenizer_of_definition)


def _tokens(definition: str, text_key: str, piece: str) -> Tensor:
    """Tokenise a piece in a worker process."""
    signal.signal(signal.SIGTERM, _end_children)  # here, too, for workers that are spawned
    tokenizer = _tokenizer(definition)
    documents = read_documents(Piece(*json.loads(piece)), text_key)
    # litdata resumes by the number of results, so every piece must have one; a piece without text gives a blank.
    return torch.cat(list(token_groups(documents, tokenizer)) or [joined([" "], tokenizer)])


def _write(folder: Path, pieces: Sequence[Piece], tokens: Callable[[str], Tensor], num_workers: int) -> None:
    """Write a split, or resume writing it.

    Raises:
        DataError: a worker found a wrong document.
    """
    from litdata import TokensLoader, optimize

    # After an error litdata sends this signal to its workers, which inherit the handler if they are forked, but not to
    # their children, which would stay.
    before = signal.signal(signal.SIGTERM, _end_children)
    try:
        optimize(
            tokens,
            [json.dumps(astuple(piece)) for piece in pieces],  # as JSON, since litdata would download paths
            str(folder),
            chunk_bytes=CHUNK_BYTES,
            num_workers=num_workers,
            use_checkpoint=True,
            item_loader=TokensLoader(),
            start_method="fork" if sys.platform == "linux" else None,  # spawned workers import for seconds
        )
    except RuntimeError as error:  # with a worker's traceback as its text
        if (said := re.search("DataError: (.+)", str(error))) is None:
            raise
        raise DataError(said[1]) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_children(*_: object) -> None:
    """End this process and its children on a signal."""
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(128 + signal.SIGTERM)


def _begin(output: Path, request: dict[str, Any], num_workers: int) -> int:
    """Save the arguments in the folder, unless an earlier call saved equal ones there; return the number of workers."""
    path = output / _REQUEST
    saved = json.loads(path.read_text()) if path.is_file() else {**request, "num_workers": num_workers}
    if {**saved, **request} != saved:
        raise DataError(
            f"--output {output} was begun with another tokenizer, --text-key or --val-fraction, or other sources."
            " Delete it, or name another folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1))
    return int(saved["num_workers"])  # litdata resumes only with as many
