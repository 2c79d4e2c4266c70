"""Token datasets on disk, in litdata's format with a ``metadata.json``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_asyncpp.data.corpus import TextFile
from lightning_asyncpp.data.replica import replica_environment
from lightning_asyncpp.data.tokenizer import Tokenizer
from lightning_asyncpp.errors import DataError

CHUNK_BYTES = 64 * 2**20
INDEX = "index.json"
METADATA = "metadata.json"
_GROUP = 256


@dataclass(frozen=True)
class Metadata:
    """Metadata of a token dataset with the splits ``train`` and ``val``."""

    vocab_size: int
    """Number of token ids of the tokenizer."""
    tokenizer: str
    """Fingerprint of the tokenizer (:attr:`.Tokenizer.fingerprint`)."""
    train_tokens: int
    """Number of training tokens, including those that end documents."""
    val_tokens: int
    """Number of validation tokens; 0 without a validation split."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``folder`` when the caller has filled it.

    If another process has made ``folder`` in the meantime, that folder stays and the temporary one is deleted.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp denies access to other users, who may share the cache
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_split(folder: Path, samples: Iterable[Any], item_loader: Any = None) -> None:
    """Write a litdata dataset in this process.

    ``litdata.optimize`` is not used here, since it spawns processes, and each of them would run the user's script again
    unless the script has an ``if __name__ == "__main__"``.
    """
    # Import late: litdata imports clients of object stores, which takes as long as importing this whole package.
    from litdata.streaming import Cache

    with replica_environment(num_replicas=1, rank=0):
        cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=item_loader)
        for index, sample in enumerate(samples):
            cache[index] = sample
        cache.done()
        cache.merge()


def write_token_dataset(
    folder: Path, train: Sequence[TextFile], validation: Sequence[TextFile], tokenizer: Tokenizer
) -> None:
    """Tokenise the files and write ``folder``; a crash leaves no incomplete dataset."""
    from litdata import TokensLoader

    with new_folder(folder) as partial:
        for name, files in (("train", train), ("val", validation)):
            if files:
                texts = (file.read() for file in tqdm(files, desc="tokenising", unit="file", leave=False))
                write_split(partial / name, token_groups(texts, tokenizer), TokensLoader())
        finish_token_dataset(partial, tokenizer)


def finish_token_dataset(folder: Path, tokenizer: Tokenizer) -> Metadata:
    """Turn a folder with splits into a token dataset by writing the tokenizer and ``metadata.json``."""
    for name, content in tokenizer.files().items():
        (folder / name).write_text(content, encoding="utf-8")
    counts = {
        name: sum(chunk["dim"] for chunk in read_index(folder / name)["chunks"]) if (folder / name).is_dir() else 0
        for name in ("train", "val")
    }
    metadata = Metadata(tokenizer.vocab_size, tokenizer.fingerprint, counts["train"], counts["val"])
    (folder / METADATA).write_text(json.dumps(asdict(metadata), indent=2))
    return metadata


def read_index(split: Path) -> dict[str, Any]:
    """Read litdata's index of a split of tokens.

    Raises:
        DataError: the index is missing or damaged, or the dataset does not hold tokens.
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
    """Return the number of sequences of ``length`` tokens in a split."""
    return sum(chunk["dim"] // length for chunk in read_index(split)["chunks"])


def smallest_dtype(vocab_size: int) -> torch.dtype:
    """Return the smallest integer dtype that represents all token ids below ``vocab_size``."""
    limits = ((2**8, torch.uint8), (2**16, torch.uint16), (2**31, torch.int32))
    return next(dtype for limit, dtype in limits if vocab_size <= limit)


def joined(texts: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """Return the token ids of documents, (length,), each followed by the token that ends a document, if any."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    ending = torch.tensor(end, dtype=dtype)
    encoded = tokenizer.encode_batch(texts)
    return torch.cat([part for document in encoded for part in (document.to(dtype), ending)] or [ending[:0]])


def token_groups(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield the token ids of each group of documents, (length,); the documents of a group are encoded in parallel."""
    texts = iter(texts)
    while group := list(islice(texts, _GROUP)):
        if (tokens := joined(group, tokenizer)).numel():
            yield tokens


@dataclass(frozen=True)
class TokenSource:
    """Locations of the tokens of both splits."""

    train: str
    """Folder or URI of the training split."""
    validation: str | None
    """Folder or URI of the validation split; ``None`` for none."""
    folder: Path | None = None
    """Folder that was prepared from text, with metadata and tokenizer; ``None`` for other litdata datasets."""
    metadata: Metadata | None = None
    """Metadata of the dataset; ``None`` if it has none."""


def is_uri(source: str) -> bool:
    """Return whether ``source`` is a URI from which litdata streams, such as ``s3://bucket/folder``."""
    return "://" in source or source.startswith("local:")


def is_token_source(source: str) -> bool:
    """Return whether ``source`` is a litdata dataset or a folder that was prepared from text."""
    path = Path(source).expanduser()
    return is_uri(source) or (path / INDEX).exists() or (path / METADATA).exists()


def prepared_tokens(folder: Path) -> TokenSource:
    """Return the splits of a folder that was prepared from text.

    Raises:
        DataError: its metadata is damaged.
    """
    content = _read_json(folder / METADATA)
    try:
        metadata = Metadata(**{field.name: content[field.name] for field in fields(Metadata)})
    except KeyError as error:
        raise DataError(f"{folder / METADATA} has no {error}. Delete {folder} and have it prepared again") from error
    validation = str(folder / "val") if metadata.val_tokens else None
    return TokenSource(str(folder / "train"), validation, folder, metadata)


def existing_tokens(source: str, val_source: str | None) -> TokenSource:
    """Return the splits of an existing token dataset.

    A ``val_source`` that was prepared from text gives its ``val``, or its ``train`` if it has no validation split.

    Raises:
        DataError: the metadata of a dataset is damaged.
    """
    other = None if val_source is None else existing_tokens(val_source, None)
    validation = None if other is None else other.validation or other.train
    if not is_uri(source) and (Path(source).expanduser() / METADATA).exists():
        prepared = prepared_tokens(Path(source).expanduser())
        return replace(prepared, validation=validation or prepared.validation)
    return TokenSource(_expanded(source), validation)


def default_cache_dir() -> Path:
    """Return the folder for prepared datasets: ``lightning_asyncpp`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_asyncpp"


def _expanded(source: str) -> str:
    return source if is_uri(source) else str(Path(source).expanduser())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete the dataset and have it prepared again, or restore it from its"
            " source"
        ) from error
    return content if isinstance(content, dict) else {}
