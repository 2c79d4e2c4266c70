"""Tokenizers written down: built again from their definition, and in the form that transformers loads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend

from lightning_asyncpp.data import ByteTokenizer, DataError, Tokenizer, hf_tokenizer_files, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import load_tokenizer, prompt_tokens

TEXT = "def größe(x):\n    return x  # 日本 🙂 Ā ĀĠ\n"


def random_text(generator: random.Random) -> str:
    ranges = [(1, 128), (128, 0x800), (0x800, 0xD800), (0xE000, 0x11000)]
    return "".join(chr(generator.randrange(*generator.choice(ranges))) for _ in range(30))


def test_bytes_in_a_tokenizer_json() -> None:
    """The same ids for any text; byte 0 ends a document, and the letter that stands for it in GPT-2 does not."""
    backend = Backend.from_str(ByteTokenizer().backend.to_str())
    generator = random.Random(0)
    for text in [TEXT, *(random_text(generator) for _ in range(200))]:
        ids = backend.encode(text).ids
        assert ids == list(text.encode()) == ByteTokenizer().encode_batch([text])[0].tolist()
        assert backend.decode(ids) == text
    assert backend.encode("a\0b").ids == [97, 0, 98]
    assert backend.decode([97, 0, 98]) == "ab"
    assert backend.get_vocab_size() == 256


def test_tokenizers_of_their_definitions() -> None:
    trained = Tokenizer.train([TEXT * 9], 300)
    again = tokenizer_of_definition(trained.definition)
    assert isinstance(again, Tokenizer)
    assert again.fingerprint == trained.fingerprint
    assert torch.equal(again.encode_batch([TEXT])[0], trained.encode_batch([TEXT])[0])
    for definition in ("byte", ByteTokenizer().backend.to_str()):
        assert isinstance(tokenizer_of_definition(definition), ByteTokenizer)
    with pytest.raises(DataError, match=r"the content of no tokenizer\.json"):
        tokenizer_of_definition("{}")


def test_files(tmp_path: Path) -> None:
    trained = Tokenizer.train([TEXT * 9], 300)
    files = hf_tokenizer_files(trained, 64)
    config = json.loads(files["tokenizer_config.json"])
    assert config["eos_token"] == "<|endoftext|>"
    assert config["model_max_length"] == 64
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"])
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint == trained.fingerprint
    assert json.loads(hf_tokenizer_files(ByteTokenizer(), 64)["tokenizer_config.json"])["eos_token"] == "\0"


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "glm4_moe"])
def test_transformers_loads_it_beside_any_model(model_type: str, tmp_path: Path) -> None:
    """It would take the model's usual tokenizer for one that does not say otherwise."""
    transformers: Any = pytest.importorskip("transformers")
    trained = Tokenizer.train([TEXT * 9], 300)
    for tokenizer in (trained, ByteTokenizer()):
        for name, content in hf_tokenizer_files(tokenizer, 64).items():
            (tmp_path / name).write_text(content)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs(TEXT).input_ids == tokenizer.encode_batch([TEXT])[0].tolist()
        assert theirs.decode(theirs(TEXT).input_ids) == TEXT
        assert theirs.eos_token_id == tokenizer.end_of_document == 0
        assert theirs.bos_token_id is None


def test_prompts() -> None:
    assert prompt_tokens(ByteTokenizer(), "ab") == [97, 98]
    assert prompt_tokens(ByteTokenizer(), "") == [0]
    endless = Tokenizer(Backend.from_str(Tokenizer.train([TEXT], 300).definition.replace("<|endoftext|>", "<x>")))
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_tokens(endless, "")
