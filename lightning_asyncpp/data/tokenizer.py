"""Text to token ids and back: bytes, or byte-pair encoding through the `tokenizers` package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_asyncpp.data.byte_tokenizer_json import END, byte_tokenizer_json, is_byte_tokenizer_json
from lightning_asyncpp.data.errors import DataError, printable
from lightning_asyncpp.optional_packages import optional_package

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_CONFIG = "tokenizer_config.json"  # beside a tokenizer.json, as the Hugging Face Hub has it
_WITH_END = '{"end_of_text": '


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

    @property
    def definition(self) -> str:
        """Text from which :func:`tokenizer_of_definition` builds the tokenizer again, wherever that is."""

    def byte_lengths(self) -> Tensor | None:
        """Bytes of text that each id stands for, 0 for special ones: (vocab_size,); ``None`` if ids do not add up."""

    def save(self, folder: Path) -> None:
        """Write into ``folder`` what :func:`load_tokenizer` needs to build the tokenizer again."""


class ByteTokenizer:
    """The 256 values of the UTF-8 bytes; byte 0, which no text file holds, ends a document."""

    vocab_size = 256
    end_of_document = 0
    fingerprint = "byte"
    definition = "byte"

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

    def byte_lengths(self) -> Tensor:
        """One byte per id, none for the end of a document: (256,) int64."""
        lengths = torch.ones(self.vocab_size, dtype=torch.int64)
        lengths[self.end_of_document] = 0
        return lengths

    def save(self, folder: Path) -> None:
        """Write nothing: there is nothing to keep."""


class BPETokenizer:
    """Byte-pair encoding, read from a ``tokenizer.json`` or trained on a corpus.

    Documents are encoded whole, and a text that spells a special token ("<|endoftext|>") as the characters that it is:
    what a stranger wrote ends no document.

    Args:
        backend: a ``tokenizers.Tokenizer``; what it says of truncation and padding is taken out.
        end_of_text: the token that ends a document; ``None`` for the usual one of the vocabulary. An unusual one is
            part of what is saved, and of the definition.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: str | None = None) -> None:
        if not backend.get_vocab_size():
            raise DataError("the tokenizer has an empty vocabulary: name one that has tokens")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend
        self.end_of_text = end_of_text

    @classmethod
    def load(cls, path: Path, end_of_text: str | None = None) -> BPETokenizer:
        """Read a ``tokenizer.json`` as the Hugging Face `tokenizers` package writes it.

        Without ``end_of_text`` a ``tokenizer_config.json`` beside it says what ends a document, if there is one.
        """
        if not path.is_file():
            raise DataError(
                f"tokenizer={str(path)!r}: there is no such file; give 'byte', 'bpe', a tokenizer.json, or a name of "
                "the Hugging Face Hub such as 'HuggingFaceTB/SmolLM-360M'"
            )
        try:
            backend = _tokenizers().Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exceptions
            raise DataError(f"{path} cannot be read as a tokenizer.json: {error}") from error
        return cls(backend, _known(backend, end_of_text_in(path.parent)) if end_of_text is None else end_of_text)

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
        return self._first_id(_KNOWN_ENDS if self.end_of_text is None else (self.end_of_text,))

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer's definition."""
        return "bpe-" + hashlib.sha256(self.definition.encode()).hexdigest()[:16]

    @property
    def definition(self) -> str:
        """Content of its tokenizer.json, with an unusual end of documents around it."""
        if not self._ends_unusually:
            return self.tokenizer_json
        return f'{_WITH_END}{json.dumps(self.end_of_text)}, "tokenizer": {self.tokenizer_json}}}'

    @property
    def tokenizer_json(self) -> str:
        """Content of its tokenizer.json."""
        return str(self.backend.to_str())

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

    def byte_lengths(self) -> Tensor | None:
        """Bytes of text per id, (vocab_size,) int64, where a character of a token is a byte, as in GPT-2's alphabet."""
        if not isinstance(self.backend.decoder, _tokenizers().decoders.ByteLevel):
            return None
        lengths = torch.zeros(self.vocab_size, dtype=torch.int64)
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            lengths[index] = len(token)
        for index, added in self.backend.get_added_tokens_decoder().items():
            lengths[index] = 0 if added.special else len(added.content.encode())
        return lengths

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and what ends a document beside it if that is unusual."""
        self.backend.save(str(folder / "tokenizer.json"))
        if self._ends_unusually:
            (folder / _CONFIG).write_text(json.dumps({"eos_token": self.end_of_text}) + "\n", encoding="utf-8")

    @property
    def _ends_unusually(self) -> bool:
        return self.end_of_text is not None and self.end_of_document != self._first_id(_KNOWN_ENDS)

    def _first_id(self, tokens: Iterable[str]) -> int | None:
        ids = (self.backend.token_to_id(token) for token in tokens)
        return next((int(token_id) for token_id in ids if token_id is not None), None)


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids to continue; of an empty prompt the end of a document, behind which another begins.

    Raises:
        DataError: the prompt is no text, or is empty, and the tokenizer has no such token.
    """
    if prompt:
        if printable(prompt) != prompt:  # as an argument of a command whose bytes are no text
            raise DataError(f"the prompt {printable(prompt)!r} is no text in UTF-8")
        return [int(token) for token in tokenizer.encode_batch([prompt])[0]]
    if tokenizer.end_of_document is None:
        raise DataError("the prompt is empty, and the tokenizer has no token that ends a document: give a prompt")
    return [tokenizer.end_of_document]


def end_of_text_in(folder: Path) -> str | None:
    """The token that ends a text by the ``tokenizer_config.json`` of ``folder``; ``None`` if it does not say so."""
    try:
        content = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    end = content.get("eos_token") if isinstance(content, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def tokenizer_of_definition(definition: str, end_of_text: str | None = None) -> Tokenizer:
    """Build the tokenizer that has this ``definition``.

    Args:
        definition: of a tokenizer, or the content of a tokenizer.json.
        end_of_text: the token that ends a document, where the definition does not say so.

    Raises:
        DataError: none has.
    """
    if definition == ByteTokenizer.definition or is_byte_tokenizer_json(definition):
        return ByteTokenizer()
    try:
        if definition.startswith(_WITH_END):
            content = json.loads(definition)
            definition, end_of_text = json.dumps(content["tokenizer"]), content["end_of_text"]
        backend = _tokenizers().Tokenizer.from_str(definition)
        return BPETokenizer(backend, _known(backend, end_of_text))
    except ImportError:
        raise
    except Exception as error:  # the package raises bare Exceptions
        raise DataError(f"this is the content of no tokenizer.json: {error}") from error


def _known(backend: tokenizers.Tokenizer, token: str | None) -> str | None:
    return None if token is None or backend.token_to_id(token) is None else token


def _tokenizers() -> Any:
    return optional_package("tokenizers", "byte-pair encoding")


def hf_tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, str]:
    """Name -> content of the files of a tokenizer.

    Args:
        tokenizer: what to write.
        context_length: longest sequence that the model takes, in tokens.
    """
    end = tokenizer.end_of_document
    if isinstance(tokenizer, BPETokenizer):
        definition, end_token = tokenizer.tokenizer_json, None if end is None else tokenizer.backend.id_to_token(end)
    else:
        definition, end_token = byte_tokenizer_json(), END
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **({} if end_token is None else {"eos_token": end_token}),
    }
    return {"tokenizer.json": definition, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
