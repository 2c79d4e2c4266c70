"""Token datasets on disk: written once, in litdata's format, with what is known about them beside the chunks."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_asyncpp.data.corpus import TextFile
from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.replica import replica_environment
from lightning_asyncpp.data.tokenizer import Tokenizer
from lightning_asyncpp.storage.durable import checksum, replace_durably

CHUNK_BYTES = 64 * 2**20
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # folders of version 1 have no checksums
METADATA = "metadata.json"
PARTIAL = ".partial"  # ends the name of a folder that `asyncpp prepare` is still writing
PLAN = "plan.json"  # in such a folder
INDEX = "index.json"
_GROUP_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Metadata:
    """What is known about a token dataset."""

    vocab_size: int
    """Number of token ids of the tokenizer."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    train_tokens: int
    """Tokens to train on, ends of documents included."""
    val_tokens: int
    """Tokens to validate on; 0 without validation."""
    dtype: str
    """Integer type of the stored tokens, as torch names it."""
    format_version: int = FORMAT_VERSION
    """Raised whenever older readers would misread the folder."""
    checksums: dict[str, str] = field(default_factory=dict)
    """CRC-32 of every file of the splits, in hexadecimal, by its path relative to the folder; empty in version 1."""


def fingerprint(files: Sequence[TextFile], tokenizer: str, val_fraction: float) -> str:
    """Hash of all that decides the content of a token dataset.

    Args:
        files: the documents, hashed: by their names and contents. Where they are and when they were written decides
            nothing.
        tokenizer: what decides the tokens.
        val_fraction: share of the files that are kept for validation.
    """
    content = json.dumps([FORMAT_VERSION, [(file.name, file.sha256) for file in files], tokenizer, val_fraction])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def write_token_dataset(
    folder: Path, train: Sequence[TextFile], validation: Sequence[TextFile], tokenizer: Tokenizer
) -> None:
    """Tokenise the files and write ``folder`` with ``train/``, ``val/`` and ``metadata.json``.

    All is written to a temporary folder beside it and renamed when complete, so that a crash leaves no half dataset
    behind. If another process was faster, its folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        dtype = smallest_dtype(tokenizer.vocab_size)
        train_tokens = _write_split(temporary / "train", train, tokenizer, dtype)
        val_tokens = _write_split(temporary / "val", validation, tokenizer, dtype) if validation else 0
        tokenizer.save(temporary)
        stored_as = str(dtype).removeprefix("torch.")
        metadata = Metadata(
            tokenizer.vocab_size,
            tokenizer.fingerprint,
            train_tokens,
            val_tokens,
            stored_as,
            checksums=_checksums(temporary),
        )
        write_metadata(temporary, metadata)
        temporary.chmod(0o755)  # mkdtemp keeps other users out, who may share the cache
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write ``metadata.json``, which makes a folder a token dataset: all else in it comes before."""
    (folder / METADATA).write_text(json.dumps(asdict(metadata), indent=2))


def read_metadata(folder: Path) -> Metadata:
    """Read ``metadata.json`` of a folder that :func:`write_token_dataset` wrote."""
    if not (folder / METADATA).is_file():
        raise DataError(f"{folder / METADATA} is missing; delete {folder} and have it prepared again")
    content = _read_json(folder / METADATA, folder)
    version = content.get("format_version")
    if version not in READABLE_VERSIONS:
        raise DataError(
            f"{folder / METADATA} has format_version={version!r}, and this release reads "
            f"{' and '.join(map(str, READABLE_VERSIONS))}; "
            "delete the folder to have it prepared again, or use the release that wrote it"
        )
    try:
        return Metadata(**content)
    except TypeError as error:
        raise DataError(f"{folder / METADATA} is damaged ({error}); {_mend(folder)}") from error


def verify_checksums(folder: Path, metadata: Metadata) -> None:
    """Compare the files of a folder that :func:`write_token_dataset` wrote with the checksums in its metadata.

    All of the folder is read: 0.36 s per GB where the files are in memory already, measured as the median of five
    readings of 256 MiB on one core of a server, and else as long as the disk takes.

    Args:
        folder: the prepared folder.
        metadata: what :func:`read_metadata` read there; without checksums (version 1) nothing is compared.

    Raises:
        DataError: a file is missing, or holds something else than what was written.
    """
    for name, written in metadata.checksums.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing, though {METADATA} lists it; {_mend(folder)}")
        found = checksum(path)
        if found != written:
            raise DataError(
                f"{path} is damaged: its CRC-32 is {found}, and was {written} when it was written; {_mend(folder)}"
            )


def count_sequences(folder: Path, length: int) -> int:
    """Check the chunks of one split of a token dataset and count its sequences.

    Args:
        folder: the folder that holds ``index.json`` and the chunks.
        length: tokens per sequence.
    """
    index = _read_json(folder / INDEX, folder)
    try:
        kind, chunks = index["config"]["data_format"][0], index["chunks"]
        tokens = [(chunk["filename"], chunk["chunk_bytes"], chunk["dim"]) for chunk in chunks]
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"{folder / INDEX} is damaged (no {error}); {_mend(folder)}") from error
    if not str(kind).startswith("no_header_") or any(count is None for _, _, count in tokens):
        raise DataError(
            f"{folder} is a litdata dataset of {kind!r}, not of tokens; "
            "write it with litdata.optimize(..., item_loader=TokensLoader()) from 1-d integer tensors"
        )
    for name, size, _ in tokens:
        _check_chunk(folder, name, size)
    return sum(count // length for _, _, count in tokens)


def _check_chunk(folder: Path, name: str, size: int) -> None:
    path = folder / name
    if not path.is_file():
        raise DataError(f"{path} is missing, though {INDEX} lists it; {_mend(folder)}")
    if path.stat().st_size != size:
        raise DataError(f"{path} has {path.stat().st_size} bytes instead of {size}; {_mend(folder)}")


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    return {path.relative_to(folder).as_posix(): checksum(path) for path in files}


def _write_split(folder: Path, files: Sequence[TextFile], tokenizer: Tokenizer, dtype: torch.dtype) -> int:
    # Imported where it is used: litdata brings clients of object stores, which take as long as the rest of the package.
    from litdata import TokensLoader
    from litdata.streaming import Cache

    total = 0
    # Written in this process: litdata.optimize would spawn others, which run the user's script once more where it has
    # no `if __name__ == "__main__"`, and would leave the order of the chunks to chance.
    with replica_environment(num_replicas=1, rank=0):
        cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
        for index, tokens in enumerate(_tokenised(files, tokenizer, dtype)):
            cache[index] = tokens
            total += tokens.numel()
        cache.done()
        cache.merge()
    return total


def _tokenised(files: Sequence[TextFile], tokenizer: Tokenizer, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the tokens of some documents at a time, each followed by the end of a document: (length,) ``dtype``."""
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    ending = torch.tensor(end, dtype=dtype)
    for group in _groups(tqdm(files, desc="tokenising", unit="file", leave=False)):
        encoded = tokenizer.encode_batch([file.read() for file in group])
        tokens = torch.cat([part for document in encoded for part in (document.to(dtype), ending)])
        if tokens.numel():
            yield tokens


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


def smallest_dtype(vocab_size: int) -> torch.dtype:
    """Return the integer type that tokens below ``vocab_size`` are stored in."""
    limits = ((2**8, torch.uint8), (2**16, torch.uint16), (2**31, torch.int32))
    return next(dtype for limit, dtype in limits if vocab_size <= limit)


def _publish(temporary: Path, folder: Path) -> None:
    try:
        replace_durably(temporary, folder)
    except OSError:
        if not (folder / METADATA).is_file():
            raise


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path} is missing; {_mend(folder)}")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); {_mend(folder)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object; {_mend(folder)}")
    return content


def _mend(folder: Path) -> str:
    for prepared in (folder, folder.parent):
        if (prepared / METADATA).exists():
            return f"delete {prepared} and have it prepared again, or restore it from where it came"
    return f"restore {folder} from where it came"


@dataclass(frozen=True)
class CheckedTokens:
    """Makes int64 of the stored tokens of a split, and checks that the vocabulary has them.

    An embedding would end in an IndexError that names nothing, on a GPU in an assertion of the device. A class and no
    closure: litdata's worker processes are sent a pickled copy.
    """

    split: str
    """Folder or URI of the split, for the message."""
    vocab_size: int | None
    """Number of token ids; ``None`` if nobody knows it, and then nothing is checked."""
    prepared: Path | None = None
    """Folder to delete when the split is damaged; ``None`` for a dataset that others wrote."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` (length,) as int64. Negative ids pass: they stand for padding.

        Raises:
            DataError: a token id is not below ``vocab_size``.
        """
        converted = tokens.long()
        if self.vocab_size is not None:
            largest = int(converted.max())
            if largest >= self.vocab_size:
                raise DataError(self._message(largest, self.vocab_size))
        return converted

    def _message(self, largest: int, vocab_size: int) -> str:
        mend = (
            f"name the right dataset, or set vocab_size, the data's and the model's, to at least {largest + 1}"
            if self.prepared is None
            else f"it is damaged: delete {self.prepared} and have it prepared again, or restore it from where it came"
        )
        return (
            f"{self.split} holds a sequence with token id {largest}, and the vocabulary has {vocab_size} ids "
            f"(0 ... {vocab_size - 1}); {mend}"
        )
