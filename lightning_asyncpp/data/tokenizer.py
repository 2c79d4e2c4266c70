"""Text to token ids and back: bytes, or byte-pair encoding through the `tokenizers` package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_asyncpp.data.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def end_of_document(self) -> int | None:
        """Id written after every document; ``None`` to write nothing."""

    @property
    def fingerprint(self) -> str:
        """A name that differs whenever the ids of some text differ."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of each text, without the end of the document: integers, (length,)."""

    def decode(self, tokens: Tensor) -> str:
        """Text of ``tokens`` (length,); what is no valid text is replaced."""

    def save(self, folder: Path) -> None:
        """Write into ``folder`` what :func:`load_tokenizer` needs to build the tokenizer again."""


class ByteTokenizer:
    """The 256 values of the UTF-8 bytes; byte 0, which no text file holds, ends a document."""

    vocab_size = 256
    end_of_document = 0
    fingerprint = "byte"

    def encode(self, text: str) -> Tensor:
        """Token ids of ``text``: (length,) uint8."""
        return (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of each text: (length,) uint8."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """Text of ``tokens`` (length,); broken UTF-8 is replaced by U+FFFD."""
        return bytes(tokens.tolist()).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write nothing: there is nothing to keep."""


class BPETokenizer:
    """Byte-pair encoding, read from a ``tokenizer.json`` or trained on a corpus.

    Args:
        backend: a ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        """Read a ``tokenizer.json`` as the Hugging Face `tokenizers` package writes it."""
        if not path.is_file():
            raise DataError(f"tokenizer={str(path)!r}: there is no such file; give 'byte', 'bpe' or a tokenizer.json")
        try:
            return cls(_tokenizers().Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises bare Exceptions
            raise DataError(f"{path} cannot be read as a tokenizer.json: {error}") from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn a byte-level vocabulary of at most ``vocab_size`` ids (at least 257) from ``texts``."""
        package = _tokenizers()
        backend = package.Tokenizer(package.models.BPE())
        backend.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return int(max(ids)) + 1

    @property
    def end_of_document(self) -> int | None:
        """Id of the token that ends a document; ``None`` if the vocabulary has none of the usual ones."""
        ids = (self.backend.token_to_id(token) for token in _KNOWN_ENDS)
        return next((int(token_id) for token_id in ids if token_id is not None), None)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer's definition."""
        return "bpe-" + hashlib.sha256(self.backend.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str) -> Tensor:
        """Token ids of ``text``: (length,) int32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of each text: (length,) int32."""
        encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [torch.tensor(one.ids, dtype=torch.int32) for one in encoded]

    def decode(self, tokens: Tensor) -> str:
        """Text of ``tokens`` (length,), special tokens left out."""
        return str(self.backend.decode(tokens.tolist()))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""
        self.backend.save(str(folder / "tokenizer.json"))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'byte-pair encoding needs the `tokenizers` package: pip install "lightning-asyncpp[bpe]"'
        ) from error
    return tokenizers
