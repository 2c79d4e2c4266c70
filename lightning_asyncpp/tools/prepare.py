"""``asyncpp prepare SOURCE... --output FOLDER``: tokenise documents into a dataset, with ``litdata.optimize``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
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
_COMPRESSED = (".gz", ".zst")
_TEXT = (".txt", ".md")
ENDINGS = (".parquet", *_LINES, *(line + packed for line in _LINES for packed in _COMPRESSED), *_TEXT)
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
        num_workers: number of processes.

    Raises:
        DataError: a source has no files, or the folder was begun with another tokenizer, key or fraction.
    """
    from litdata import TokensLoader, optimize

    pieces = [piece for source in sources for piece in find_pieces(source, text_key)]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers run in parallel already
    _begin(output, {"tokenizer": tokenizer.fingerprint, "text_key": text_key, "val_fraction": val_fraction})
    for name, chosen in zip(("train", "val"), split(pieces, val_fraction)):
        if chosen and not (output / name / INDEX).is_file():
            optimize(
                partial(_tokens, tokenizer.definition, text_key),
                [json.dumps(astuple(piece)) for piece in chosen],  # as JSON, since litdata would download paths
                str(output / name),
                chunk_bytes=CHUNK_BYTES,
                num_workers=num_workers,
                use_checkpoint=True,
                item_loader=TokensLoader(),
                start_method="fork" if sys.platform == "linux" else None,  # spawned workers import for seconds
            )
    found = finish_token_dataset(output, tokenizer)
    print(
        f"{output}: {found.train_tokens:,} tokens to train on, {found.val_tokens:,} to validate on. Train on it: --data"
        f" lightning_asyncpp.data.TextDataModule --data.source {output}, with a model of vocab_size={found.vocab_size}"
        " or more."
    )


def find_pieces(source: str, text_key: str) -> list[Piece]:
    """List the pieces of a source, in the order of the files' names.

    Raises:
        DataError: the source has no files, or a parquet file has no column ``text_key``.
    """
    system, path = fsspec.core.url_to_fs(os.path.expanduser(source))
    paths = system.glob(path) if set("*?[") & set(path) else system.find(path)
    names = [name for name in sorted(paths) if name.endswith(ENDINGS)]
    if not names:
        raise DataError(f"{source}: there is no file that ends in {', '.join(ENDINGS)}. Correct the path or the glob")
    with ThreadPoolExecutor(8) as pool:  # reading footers of parquet files over a network is slow
        return [piece for pieces in pool.map(partial(_pieces_of, system, text_key), names) for piece in pieces]


def _pieces_of(system: Any, text_key: str, path: str) -> list[Piece]:
    url, name = system.unstrip_protocol(path), os.path.basename(path)
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
    """Yield the documents of a piece; a line belongs to the piece in which it begins."""
    kind = piece.url.removesuffix(".gz").removesuffix(".zst")
    with fsspec.open(piece.url, "rb", compression="infer") as file:
        if kind.endswith(".parquet"):
            table = _parquet().ParquetFile(file).read_row_group(piece.start, columns=[text_key])
            yield from filter(None, table.column(0).to_pylist())
        elif kind.endswith(_LINES):
            if piece.start:
                file.seek(piece.start - 1)
                file.readline()
            while file.tell() < piece.stop and (line := file.readline()):
                if line.strip() and (text := json.loads(line)[text_key]):
                    yield text
        else:
            yield file.read().decode()


def _parquet() -> Any:
    return optional_package("pyarrow.parquet", "reading parquet files")


_tokenizer = lru_cache(maxsize=1)(tokenizer_of_definition)


def _tokens(definition: str, text_key: str, piece: str) -> Tensor:
    """Tokenise a piece in a worker process."""
    tokenizer = _tokenizer(definition)
    documents = read_documents(Piece(*json.loads(piece)), text_key)
    # litdata resumes by the number of results, so every piece must have one; a piece without text gives a blank.
    return torch.cat(list(token_groups(documents, tokenizer)) or [joined([" "], tokenizer)])


def _begin(output: Path, request: dict[str, Any]) -> None:
    """Save the arguments in the folder; those that an earlier call saved there must be equal."""
    path = output / _REQUEST
    if path.is_file() and json.loads(path.read_text()) != request:
        raise DataError(
            f"--output {output} was begun with another tokenizer, --text-key or --val-fraction. Delete it, or name"
            " another folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(request, indent=1))
