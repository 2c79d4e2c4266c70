"""Tokenizers between text and token ids: bytes, or a tokenizer.json of the `tokenizers` package."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lightning_asyncpp.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_CONFIG = "tokenizer_config.json"  # in the folder of tokenizer.json, as on the Hugging Face Hub
_WITH_END = '{"end_of_text": '
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # "gpt2", "HuggingFaceTB/SmolLM-360M"


class Tokenizer:
    """``tokenizers.Tokenizer`` for pretraining: it encodes whole documents, and names the token that ends a document.

    If the text of a document contains the characters of a special token, such as "<|endoftext|>", they are encoded as
    ordinary characters and do not end the document.

    Args:
        backend: tokenizer to wrap; its truncation and padding are switched off.
        end_of_text: token that ends a document; ``None`` for the first usual one ("<|endoftext|>", "</s>", ...)
            that the vocabulary has.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend
        usual = next((token for token in _KNOWN_ENDS if backend.token_to_id(token) is not None), None)
        self.end_of_text = usual if end_of_text is None else end_of_text
        self._ends_unusually = self.end_of_text != usual

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train a byte-level byte-pair encoding of at most ``vocab_size`` ids (at least 257)."""
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including those of added tokens."""
        return int(max(self.backend.get_vocab(with_added_tokens=True).values())) + 1

    @property
    def end_of_document(self) -> int | None:
        """Id of the token that ends a document; ``None`` if there is no such token."""
        found = None if self.end_of_text is None else self.backend.token_to_id(self.end_of_text)
        return None if found is None else int(found)

    @property
    def definition(self) -> str:
        """Text for :func:`tokenizer_of_definition`: tokenizer.json, and ``end_of_text`` unless it is the usual one."""
        content = str(self.backend.to_str())
        if not self._ends_unusually:
            return content
        return f'{_WITH_END}{json.dumps(self.end_of_text)}, "tokenizer": {content}}}'

    @property
    def fingerprint(self) -> str:
        """Name that differs between two tokenizers if any text is encoded differently."""
        return "tokenizer-" + hashlib.sha256(self.definition.encode()).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each text, without the token that ends a document: (length,) int32."""
        encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [torch.tensor(one.ids, dtype=torch.int32) for one in encoded]

    def decode(self, tokens: Tensor) -> str:
        """Return the text of ``tokens`` (length,) without special tokens; invalid UTF-8 is replaced."""
        return str(self.backend.decode(tokens.tolist()))

    def files(self, context_length: int | None = None) -> dict[str, str]:
        """Return the contents of the files from which this package and `transformers` load it, by file name.

        Args:
            context_length: maximum length of a sequence, in tokens.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **({} if context_length is None else {"model_max_length": context_length}),
            **({} if self.end_of_document is None else {"eos_token": self.end_of_text}),
        }
        return {"tokenizer.json": self.backend.to_str(), _CONFIG: json.dumps(config, indent=2) + "\n"}


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes, 256 ids; byte 0, which text files do not contain, ends a document."""

    definition = fingerprint = "byte"

    def __init__(self) -> None:
        # A byte-pair encoding without pairs, for programs that read the saved tokenizer.json; not used to encode here.
        vocabulary = {"\0" if byte == 0 else character: byte for byte, character in enumerate(_alphabet())}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["\0"])
        super().__init__(backend, "\0")

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each text: (length,) uint8."""
        return [torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)[:-1] for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """Return the text of ``tokens`` (length,); invalid UTF-8 is replaced by U+FFFD."""
        return bytes(tokens.tolist()).decode(errors="replace")


def _alphabet() -> list[str]:
    """Return the character for each byte in GPT-2's vocabulary: of the same code if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """Load a tokenizer by its name.

    Args:
        name: ``"byte"``, the path of a tokenizer.json or of a folder with one, or the name of a repository of models on
            the Hugging Face Hub, from which the file is fetched once.
        end_of_text: token that ends a document; ``None`` for that in the ``tokenizer_config.json`` of the same folder.
            If there is none, or the vocabulary lacks it, the first usual one in the vocabulary is taken.

    Raises:
        DataError: the file does not exist, or is not a tokenizer.json.
    """
    if name == "byte":
        return ByteTokenizer()
    path = fetch(name, "tokenizer.json") if is_hub_name(name) else Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        definition = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"tokenizer={name!r} cannot be read ({error}). Give 'byte', a tokenizer.json, or a name of the Hugging Face"
            " Hub such as 'HuggingFaceTB/SmolLM-360M'"
        ) from error
    return tokenizer_of_definition(definition, end_of_text or end_of_text_in(path.parent))


def known_tokenizer(name: str) -> Tokenizer | None:
    """Load a tokenizer as :func:`load_tokenizer` does; return ``None`` if there is none of this format."""
    try:
        return load_tokenizer(name)
    except DataError:
        return None


def tokenizer_of_definition(definition: str, end_of_text: str | None = None) -> Tokenizer:
    """Build a tokenizer from its definition.

    Args:
        definition: definition of a tokenizer, or the content of a tokenizer.json.
        end_of_text: token that ends a document, for definitions that do not name one; ignored if not in the vocabulary.

    Raises:
        DataError: the definition is not a tokenizer's.
    """
    if definition == ByteTokenizer.definition:
        return ByteTokenizer()
    try:
        if definition.startswith(_WITH_END):
            content = json.loads(definition)
            definition, end_of_text = json.dumps(content["tokenizer"]), content["end_of_text"]
        backend = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the package raises bare Exceptions
        raise DataError(f"this is not the content of a tokenizer.json: {error}") from error
    byte = ByteTokenizer()
    if backend.to_str() == byte.backend.to_str():
        return byte
    is_known = end_of_text is not None and backend.token_to_id(end_of_text) is not None
    return Tokenizer(backend, end_of_text if is_known else None)


def end_of_text_in(folder: Path) -> str | None:
    """Return the ``eos_token`` in the ``tokenizer_config.json`` of ``folder``; ``None`` if there is none."""
    try:
        content = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    end = content.get("eos_token") if isinstance(content, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` looks like a repository of the hub and is not a local path."""
    return _HUB_NAME.fullmatch(name) is not None and not name.endswith(".json") and not Path(name).exists()


def fetch(name: str, file: str) -> Path:
    """Download a file of a repository of models unless it is in the hub's cache, and return its path.

    Raises:
        DataError: the hub cannot be reached, or has no such file.
    """
    import huggingface_hub  # imported late, since it takes half as long as this whole package

    try:
        return Path(huggingface_hub.hf_hub_download(name, file))
    except Exception as error:  # of any class: the client has twice changed its HTTP library and its exceptions
        reason = next(iter(str(error).strip().splitlines()), "")
        raise DataError(
            f"{name!r} is not a local file or folder, and the Hugging Face Hub gives no {file} of it"
            f" ({type(error).__name__}: {reason}). Correct the name. Without internet access, copy the repository here"
            f" (`hf download {name} --local-dir DIR`) and give its path"
        ) from error


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a prompt; one without any becomes the token after which a document begins.

    Raises:
        DataError: the prompt has no token, and the tokenizer has no token that ends a document.
        UnicodeEncodeError: the prompt is not text.
    """
    prompt.encode()  # its error says more of bytes on a command line that are no text than that of `tokenizers`
    if tokens := [int(token) for token in tokenizer.encode_batch([prompt])[0]]:
        return tokens
    if tokenizer.end_of_document is None:
        raise DataError("the prompt is empty, and the tokenizer has no token that ends a document: give a prompt")
    return [tokenizer.end_of_document]
