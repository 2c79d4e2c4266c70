"""Tokenizers decode what they encode, can be saved and loaded again, and can be loaded by transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend

from lightning_asyncpp.data import ByteTokenizer, DataError, Tokenizer, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import load_tokenizer, prompt_tokens

TEXT = "def größe(x):\n    return x  # 日本 🙂 Ā ĀĠ\n"


def random_text(generator: random.Random) -> str:
    ranges = [(1, 128), (128, 0x800), (0x800, 0xD800), (0xE000, 0x11000)]
    return "".join(chr(generator.randrange(*generator.choice(ranges))) for _ in range(30))


def test_bytes_here_and_in_a_tokenizer_json() -> None:
    """ByteTokenizer and its tokenizer.json give equal ids; byte 0 ends documents, GPT-2's character for it does not."""
    tokenizer = ByteTokenizer()
    backend = Backend.from_str(tokenizer.backend.to_str())
    generator = random.Random(0)
    for text in ["", TEXT, *(random_text(generator) for _ in range(200))]:
        tokens = tokenizer.encode_batch([text])[0]
        assert tokens.tolist() == list(text.encode()) == backend.encode(text).ids
        assert tokenizer.decode(tokens) == backend.decode(tokens.tolist()) == text
    assert backend.encode("a\0b").ids == [97, 0, 98]
    assert backend.get_vocab_size() == 256
    assert isinstance(tokenizer_of_definition(tokenizer.backend.to_str()), ByteTokenizer)


def test_bpe_there_and_back() -> None:
    trained, again = (Tokenizer.train([TEXT * 3, "return " * 50], vocab_size=300) for _ in range(2))
    assert 257 < trained.vocab_size <= 300
    tokens = trained.encode_batch([TEXT + "\x01 never seen: ŧ"])[0]
    assert len(tokens) < len(TEXT.encode())
    assert trained.decode(tokens) == TEXT + "\x01 never seen: ŧ"
    assert trained.fingerprint == again.fingerprint


def test_the_end_of_documents_is_kept(tmp_path: Path) -> None:
    backend = Tokenizer.train([TEXT * 3], vocab_size=300).backend
    backend.add_special_tokens(["<|over|>"])
    usual, unusual = Tokenizer(backend), Tokenizer(backend, "<|over|>")
    assert (usual.end_of_document, unusual.end_of_document) == (0, backend.token_to_id("<|over|>"))
    assert usual.fingerprint != unusual.fingerprint
    for tokenizer in (unusual, usual):
        folder = tmp_path / str(tokenizer.end_of_document)
        folder.mkdir()
        for name, content in tokenizer.files().items():
            (folder / name).write_text(content)
        for again in (load_tokenizer(str(folder)), tokenizer_of_definition(tokenizer.definition)):
            assert again.fingerprint == tokenizer.fingerprint
            assert again.end_of_document == tokenizer.end_of_document
            assert torch.equal(again.encode_batch([TEXT])[0], tokenizer.encode_batch([TEXT])[0])
    backend.save(str(tmp_path / "tokenizer.json"))
    for eos, end in (({"content": "<|over|>"}, unusual.end_of_document), ("not in the vocabulary", 0), (None, 0)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(str(tmp_path)).end_of_document == end


@pytest.mark.parametrize("model_type", ["llama", "glm4_moe"])
def test_transformers_loads_it_beside_any_model(model_type: str, tmp_path: Path) -> None:
    """Files of a tokenizer name their class; without it, transformers would use the usual class of the model."""
    transformers: Any = pytest.importorskip("transformers")
    for tokenizer in (Tokenizer.train([TEXT * 9], 300), ByteTokenizer()):
        for name, content in tokenizer.files(64).items():
            (tmp_path / name).write_text(content)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs(TEXT).input_ids == tokenizer.encode_batch([TEXT])[0].tolist()
        assert theirs.decode(theirs(TEXT).input_ids) == TEXT
        assert (theirs.eos_token_id, theirs.bos_token_id, theirs.model_max_length) == (0, None, 64)


def test_prompts() -> None:
    assert prompt_tokens(ByteTokenizer(), "ab") == [97, 98]
    assert prompt_tokens(ByteTokenizer(), "") == [0]
    endless = Tokenizer(Backend.from_str(Tokenizer.train([TEXT], 300).definition.replace("<|endoftext|>", "<x>")))
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_tokens(endless, "")
