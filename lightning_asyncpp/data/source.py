"""What the `source` of a data module stands for: text to be tokenised, or tokens that are there already."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_asyncpp.data.corpus import LIBRARIES, TextFile, find_text_files, split
from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.token_dataset import INDEX, METADATA, Metadata, read_metadata, write_token_dataset
from lightning_asyncpp.data.tokenizer import Tokenizer, load_tokenizer

_FORMAT = 3  # of a prepared folder; raised whenever an older one must not be taken for a new one
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenSource:
    """Where the tokens of both splits are."""

    train: str
    """Folder or URI of the training split."""
    validation: str | None
    """Folder or URI of the validation split; ``None`` for none."""
    folder: Path | None = None
    """Prepared folder with the metadata and the tokenizer; ``None`` for a dataset that others wrote."""
    metadata: Metadata | None = None
    """What is known about the dataset; ``None`` if nothing is."""


@dataclass(frozen=True)
class TextSource:
    """Text, and all that decides the tokens made of it."""

    source: str
    """A folder, or a key of `LIBRARIES`."""
    patterns: tuple[str, ...]
    """Globs of the files to take."""
    tokenizer: str
    """``"byte"``, ``"bpe"``, or what :func:`.load_tokenizer` takes."""
    vocab_size: int | None
    """Number of token ids of a vocabulary to be trained."""
    val_fraction: float
    """Share of the files that are kept for validation."""
    max_bytes: int | None
    """Most bytes of text to take."""
    cache_dir: Path
    """Where prepared datasets are kept."""

    def prepare(self) -> None:
        """Write the token dataset unless it is there; all text is read for its name.

        Raises:
            DataError: the text cannot be read.
        """
        files = find_text_files(self.source, self.patterns, self.max_bytes)
        folder = self._folder(files)
        if folder.exists():
            return
        _log.info("preparing tokens of %s (%d files) in %s", self.source, len(files), folder)
        train, validation = split(files, self.val_fraction)
        if self.tokenizer == "bpe":
            assert self.vocab_size is not None
            tokenizer = Tokenizer.train((file.read() for file in train), self.vocab_size)
        else:
            tokenizer = load_tokenizer(self.tokenizer)
        write_token_dataset(folder, train, validation, tokenizer)

    def prepared(self) -> TokenSource:
        """Return the prepared token dataset.

        Raises:
            DataError: it is not there.
        """
        folder = self._folder(find_text_files(self.source, self.patterns, self.max_bytes))
        if not folder.is_dir():
            raise DataError(f"{folder} is not prepared. Call prepare_data() before setup(), on every node")
        return prepared_tokens(folder)

    def _folder(self, files: Sequence[TextFile]) -> Path:
        """The folder of the token dataset: named after the documents' names and contents, and the tokenizer."""
        given = f"bpe-{self.vocab_size}" if self.tokenizer == "bpe" else load_tokenizer(self.tokenizer).fingerprint
        name = self.source if self.source in LIBRARIES else Path(self.source).expanduser().resolve().name
        digests = [(file.name, hashlib.sha256(file.path.read_bytes()).hexdigest()) for file in files]
        content = json.dumps([_FORMAT, digests, given, self.val_fraction])
        readable = name.encode(errors="replace").decode()
        return self.cache_dir / f"{readable}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def is_uri(source: str) -> bool:
    """Whether ``source`` names a place that litdata streams from, such as ``s3://bucket/folder``."""
    return "://" in source or source.startswith("local:")


def is_token_source(source: str) -> bool:
    """Whether ``source`` is a litdata dataset or a folder that was prepared from text, and not text."""
    path = Path(source).expanduser()
    return is_uri(source) or (path / INDEX).exists() or (path / METADATA).exists()


def prepared_tokens(folder: Path) -> TokenSource:
    """Return the splits of a folder that was prepared from text."""
    metadata = read_metadata(folder)
    validation = str(folder / "val") if metadata.val_tokens else None
    return TokenSource(str(folder / "train"), validation, folder, metadata)


def existing_tokens(source: str, val_source: str | None) -> TokenSource:
    """Return the splits of a token dataset that is there already.

    Raises:
        DataError: ``val_source`` is none.
    """
    if val_source is not None and not is_token_source(val_source):
        raise DataError(f"val_source={val_source!r} has no {INDEX}. Name the folder of a litdata dataset")
    if not is_uri(source) and (Path(source).expanduser() / METADATA).exists():
        prepared = prepared_tokens(Path(source).expanduser())
        return TokenSource(prepared.train, val_source or prepared.validation, prepared.folder, prepared.metadata)
    return TokenSource(_expanded(source), None if val_source is None else _expanded(val_source))


def default_cache_dir() -> Path:
    """Folder for prepared datasets: ``lightning_asyncpp`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_asyncpp"


def _expanded(source: str) -> str:
    return source if is_uri(source) else str(Path(source).expanduser())
