"""The last step: pieces side by side, one index over them, and what is known about them beside it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from litdata import TokensLoader
from litdata.streaming import Cache
from torch import Tensor

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.replica import replica_environment
from lightning_asyncpp.data.token_dataset import (
    CHUNK_BYTES,
    INDEX,
    PLAN,
    Metadata,
    count_sequences,
    write_metadata,
)
from lightning_asyncpp.storage.durable import checksum, replace_durably
from lightning_asyncpp.tools.prepare.pieces import VALIDATION, Record, Work
from lightning_asyncpp.tools.prepare.source_files import SourceFile
from lightning_asyncpp.version import __version__

ORIGIN = "prepared.json"
READY = "ready"
_READ_TOKENS = 2**20


def assemble(work: Work, output: Path) -> Record:
    """Make the token dataset of all pieces and rename it to ``output``. It can be interrupted and called again.

    Args:
        work: the preparation, with every piece done.
        output: the folder to make.

    Returns:
        What became of all pieces together.

    Raises:
        DataError: there is nothing to train on, or something is missing.
    """
    records = {index: work.record(index) for index in range(len(work.plan.pieces))}
    done = {index: record for index, record in records.items() if record is not None}
    total = add_up(list(done.values()))
    if len(done) < len(records) or not total.train_tokens:
        raise DataError(
            "no document is left to train on; lower --val-fraction, or give more text"
            if len(done) == len(records)
            else f"{work.folder}: {len(records) - len(done)} pieces are missing; run the command again"
        )
    ready = work.folder / READY
    checksums = _merge_training(work, ready / "train", done)
    checksums |= _write_validation(work, ready / "val", total.val_tokens)
    _check(ready, total)
    work.tokenizer.save(ready)
    (ready / ORIGIN).write_text(json.dumps(_origin(work, total), indent=2))
    write_metadata(
        ready,
        Metadata(
            work.tokenizer.vocab_size,
            work.tokenizer.fingerprint,
            total.train_tokens,
            total.val_tokens,
            str(work.dtype).removeprefix("torch."),
            checksums=checksums,
        ),
    )
    replace_durably(ready, output)
    (work.folder / PLAN).unlink()  # first: what is left of the pieces is no work in progress
    shutil.rmtree(work.folder, ignore_errors=True)
    return total


@dataclass(frozen=True)
class Origin:
    """What a folder was made of."""

    request: dict[str, Any]
    """The arguments that decided what was written."""
    files: tuple[SourceFile, ...]
    """The files that were read."""


def read_origin(output: Path) -> Origin | None:
    """Read how a folder was prepared; ``None`` if `asyncpp prepare` did not write it."""
    try:
        content = json.loads((output / ORIGIN).read_text())
        return Origin(content["request"], tuple(SourceFile(**file) for file in content["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def add_up(records: Sequence[Record]) -> Record:
    """Return the sums over pieces."""
    names = [field.name for field in fields(Record) if field.type == "int"]
    return Record(**{name: sum(getattr(record, name) for record in records) for name in names})


def _merge_training(work: Work, folder: Path, records: dict[int, Record]) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    for begun in folder.glob(f"*{INDEX}"):
        begun.unlink()
    checksums = {}
    with_tokens = [index for index, record in records.items() if record.train_tokens]
    for index in with_tokens:
        piece = work.piece_folder(index)
        for name, value in records[index].checksums.items():
            if not (folder / name).exists():  # else moved by an earlier call
                _move(piece / name, folder / name)
            checksums[f"train/{name}"] = value
        shutil.copyfile(piece / f"{index}.{INDEX}", folder / f"{index}.{INDEX}")
    with replica_environment(num_replicas=1, rank=0):
        Cache(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader()).merge(num_workers=len(with_tokens))
    return {**checksums, f"train/{INDEX}": checksum(folder / INDEX)}


def _move(chunk: Path, to: Path) -> None:
    try:
        os.replace(chunk, to)
    except FileNotFoundError as error:
        raise DataError(
            f"{chunk} is gone; delete {chunk.parent}, and run the command again to have it tokenised anew"
        ) from error


def _write_validation(work: Work, folder: Path, tokens: int) -> dict[str, str]:
    shutil.rmtree(folder, ignore_errors=True)
    if not tokens:
        return {}
    # The share of a piece is small, and would be a chunk of its own, whose rest fills no sequence.
    with replica_environment(num_replicas=1, rank=0):
        cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
        for index, part in enumerate(_validation_tokens(work)):
            cache[index] = part
        cache.done()
        cache.merge()
    return {f"val/{path.name}": checksum(path) for path in sorted(folder.iterdir())}


def _validation_tokens(work: Work) -> Iterator[Tensor]:
    """Yield the validation tokens of all pieces in their order, some at a time: (length,), as they are stored."""
    stored_as = numpy.dtype(str(work.dtype).removeprefix("torch."))
    for index in range(len(work.plan.pieces)):
        with (work.piece_folder(index) / VALIDATION).open("rb") as file:
            while content := file.read(_READ_TOKENS * stored_as.itemsize):
                yield torch.from_numpy(numpy.frombuffer(content, dtype=stored_as).copy())


def _check(ready: Path, total: Record) -> None:
    """Compare what the index lists and the disk holds with what the pieces counted."""
    for split, tokens in (("train", total.train_tokens), ("val", total.val_tokens)):
        stored = count_sequences(ready / split, 1) if tokens else 0
        if stored != tokens:
            raise DataError(f"{ready / split} holds {stored} tokens instead of {tokens}; delete {ready.parent}")


def _origin(work: Work, total: Record) -> dict[str, Any]:
    return {
        "request": work.plan.request,
        "files": [{"url": file.url, "size": file.size} for file in work.plan.files],
        "pieces": len(work.plan.pieces),
        "documents": total.documents,
        "val_documents": total.val_documents,
        "empty_documents": total.empty,
        "text_bytes": total.text_bytes,
        "vocab_size": work.tokenizer.vocab_size,
        "end_of_document": work.tokenizer.end_of_document,
        "written_by": f"lightning-asyncpp {__version__}",
    }
