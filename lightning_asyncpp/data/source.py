"""What the `source` of a data module stands for: text to be tokenised, or tokens that are there already."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_asyncpp.data.corpus import LIBRARIES, TextFile, find_text_files, split_files
from lightning_asyncpp.data.errors import DataError, file_errors, printable
from lightning_asyncpp.data.hub import fetch_tokenizer, is_hub_name
from lightning_asyncpp.data.token_dataset import (
    INDEX,
    METADATA,
    PARTIAL,
    PLAN,
    Metadata,
    fingerprint,
    read_metadata,
    write_token_dataset,
)
from lightning_asyncpp.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

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
    """``"byte"``, ``"bpe"``, or the path of a tokenizer.json."""
    vocab_size: int | None
    """Number of token ids of a vocabulary to be trained."""
    val_fraction: float
    """Share of the files that are kept for validation."""
    max_bytes: int | None
    """Most bytes of text to take."""
    cache_dir: Path
    """Where prepared datasets are kept."""

    def folder(self) -> Path:
        """Return the folder of the token dataset, prepared or not; all text is read for its name."""
        return self._folder(self._files())

    def prepare(self) -> None:
        """Write the token dataset unless it is there.

        Raises:
            DataError: the text cannot be read or changes meanwhile, or the folder cannot be written.
        """
        files = self._files()
        folder = self._folder(files)
        if folder.exists():
            return
        shown = printable(str(self.source)), len(files), printable(str(folder))
        _log.info("preparing tokens of %s (%d files) in %s", *shown)
        train, validation = split_files(files, self.val_fraction)
        tokenizer: Tokenizer
        if self.tokenizer == "bpe":
            assert self.vocab_size is not None
            tokenizer = BPETokenizer.train((file.read() for file in train), self.vocab_size)
        else:
            tokenizer = load_tokenizer(self.tokenizer)
        with file_errors(f"cache_dir={str(self.cache_dir)!r}", "written", "name another cache_dir"):
            write_token_dataset(folder, train, validation, tokenizer)

    def _files(self) -> list[TextFile]:
        _refuse_unfinished(self.source)
        return [file.hashed() for file in find_text_files(self.source, self.patterns, self.max_bytes)]

    def _folder(self, files: Sequence[TextFile]) -> Path:
        given = f"bpe-{self.vocab_size}" if self.tokenizer == "bpe" else load_tokenizer(self.tokenizer).fingerprint
        name = self.source if self.source in LIBRARIES else Path(self.source).expanduser().resolve().name
        readable = name.encode(errors="replace").decode()
        return self.cache_dir / f"{readable}-{fingerprint(files, given, self.val_fraction)}"

    def prepared(self) -> TokenSource:
        """Return the prepared token dataset."""
        folder = self.folder()
        if not folder.is_dir():
            raise DataError(
                f"{folder} is not prepared; call prepare_data() before setup(), on every node, and let nothing change "
                "the text meanwhile"
            )
        return prepared_tokens(folder)


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
    """Return the splits of a token dataset that is there already."""
    for name, place in (("source", source), ("val_source", val_source)):
        if place is not None and not is_token_source(place):
            raise DataError(f"{name}={place!r} is no litdata dataset: it has no {INDEX}; name the folder that has one")
    if not is_uri(source) and (Path(source).expanduser() / METADATA).exists():
        prepared = prepared_tokens(Path(source).expanduser())
        return TokenSource(prepared.train, val_source or prepared.validation, prepared.folder, prepared.metadata)
    return TokenSource(_expanded(source), None if val_source is None else _expanded(val_source))


def load_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """Build the tokenizer that ``name`` stands for.

    Args:
        name: ``"byte"``, the path of a tokenizer.json or of a folder with one, or the name of a repository of models on
            the Hugging Face Hub, from which the file is fetched once.
        end_of_text: the token that ends a document; ``None`` for the usual one of the vocabulary.
    """
    if name == "byte":
        return ByteTokenizer()
    if is_hub_name(name):
        return BPETokenizer.load(fetch_tokenizer(name), end_of_text)
    path = Path(name).expanduser()
    return BPETokenizer.load(path / "tokenizer.json" if path.is_dir() else path, end_of_text)


def default_cache_dir() -> Path:
    """Folder for prepared datasets: ``lightning_asyncpp`` in the user's cache folder.

    Raises:
        DataError: there is no home folder.
    """
    with file_errors("cache_dir=None", "found", "name a folder"):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_asyncpp"


def _refuse_unfinished(source: str) -> None:
    # Its files end in .json, and would be taken for text.
    path = Path(source).expanduser()
    for folder in (path, path.with_name(path.name + PARTIAL)):
        if folder.name.endswith(PARTIAL) and (folder / PLAN).is_file():
            raise DataError(
                f"source={source!r}: {folder} is a preparation that has not ended; run its `asyncpp prepare` again, it "
                "goes on where it was, and name its --output here"
            )


def _expanded(source: str) -> str:
    return source if is_uri(source) else str(Path(source).expanduser())
