"""Token datasets on disk: in litdata's format, with what is known about them in ``metadata.json`` beside the chunks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_asyncpp.data.corpus import TextFile
from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.replica import replica_environment
from lightning_asyncpp.data.tokenizer import Tokenizer

CHUNK_BYTES = 64 * 2**20
INDEX = "index.json"
METADATA = "metadata.json"
_GROUP_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Metadata:
    """What is known about a token dataset with the splits ``train`` and ``val``."""

    vocab_size: int
    """Number of token ids of the tokenizer."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    train_tokens: int
    """Tokens to train on, ends of documents included."""
    val_tokens: int
    """Tokens to validate on; 0 without validation."""


def write_token_dataset(
    folder: Path, train: Sequence[TextFile], validation: Sequence[TextFile], tokenizer: Tokenizer
) -> None:
    """Tokenise the files and write ``folder``.

    All is written to a temporary folder beside it and renamed when complete, so that a crash leaves no half dataset
    behind. If another process was faster, its folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, files in (("train", train), ("val", validation)):
            if files:
                _write_split(temporary / name, files, tokenizer)
        finish_token_dataset(temporary, tokenizer)
        temporary.chmod(0o755)  # mkdtemp keeps other users out, who may share the cache
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / METADATA).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finish_token_dataset(folder: Path, tokenizer: Tokenizer) -> Metadata:
    """Write the tokenizer and ``metadata.json``, which makes a folder with its splits a token dataset."""
    tokenizer.save(folder)
    counts = {
        name: sum(chunk["dim"] for chunk in read_index(folder / name)["chunks"]) if (folder / name).is_dir() else 0
        for name in ("train", "val")
    }
    metadata = Metadata(tokenizer.vocab_size, tokenizer.fingerprint, counts["train"], counts["val"])
    (folder / METADATA).write_text(json.dumps(asdict(metadata), indent=2))
    return metadata


def read_metadata(folder: Path) -> Metadata:
    """Read ``metadata.json`` of a token dataset.

    Raises:
        DataError: it is not there, or damaged.
    """
    content = _read_json(folder / METADATA)
    try:
        return Metadata(**{field.name: content[field.name] for field in fields(Metadata)})
    except KeyError as error:
        raise DataError(f"{folder / METADATA} has no {error}. Delete {folder} and have it prepared again") from error


def read_index(split: Path) -> dict[str, Any]:
    """Read litdata's index of a split of tokens.

    Raises:
        DataError: it is not there, damaged, or of something else than tokens.
    """
    index = _read_json(split / INDEX)
    kind = (index.get("config") or {}).get("data_format")
    if not (isinstance(kind, list) and str(kind[0]).startswith("no_header_")):
        raise DataError(
            f"{split} is a litdata dataset of {kind!r}, not of tokens. Write it with"
            " litdata.optimize(..., item_loader=TokensLoader()) from 1-d integer tensors"
        )
    return index


def count_sequences(split: Path, length: int) -> int:
    """Number of sequences of ``length`` tokens in a split."""
    return sum(chunk["dim"] // length for chunk in read_index(split)["chunks"])


def smallest_dtype(vocab_size: int) -> torch.dtype:
    """Return the integer type that tokens below ``vocab_size`` are stored in."""
    limits = ((2**8, torch.uint8), (2**16, torch.uint16), (2**31, torch.int32))
    return next(dtype for limit, dtype in limits if vocab_size <= limit)


def joined(texts: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """Token ids of documents one after the other, each followed by the end of a document: (length,)."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    ending = torch.tensor(end, dtype=dtype)
    encoded = tokenizer.encode_batch(texts)
    return torch.cat([part for document in encoded for part in (document.to(dtype), ending)] or [ending[:0]])


def _write_split(folder: Path, files: Sequence[TextFile], tokenizer: Tokenizer) -> None:
    # Imported where it is used: litdata brings clients of object stores, which take as long as the rest of the package.
    from litdata import TokensLoader
    from litdata.streaming import Cache

    # Written in this process: litdata.optimize would spawn others, which run the user's script once more where it has
    # no `if __name__ == "__main__"`.
    with replica_environment(num_replicas=1, rank=0):
        cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
        groups = _groups(tqdm(files, desc="tokenising", unit="file", leave=False))
        parts = (joined([file.read() for file in group], tokenizer) for group in groups)
        for index, tokens in enumerate(part for part in parts if part.numel()):
            cache[index] = tokens
        cache.done()
        cache.merge()


def _groups(files: Iterable[TextFile]) -> Iterator[list[TextFile]]:
    group: list[TextFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.size
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete the dataset and have it prepared again, or restore it from where"
            " it came"
        ) from error
    return content if isinstance(content, dict) else {}
