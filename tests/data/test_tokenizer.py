from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_asyncpp.data import ByteTokenizer, DataError, Tokenizer, hf_tokenizer_files, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import load_tokenizer

TEXT = "def größe(x):\n    return x  # 日本\n"


def test_bytes_there_and_back() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_batch([TEXT])[0]
    assert tokens.dtype == torch.uint8
    assert tokens.tolist() == list(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.encode_batch([""])[0].shape == (0,)


def test_bpe_there_and_back(tmp_path: Path) -> None:
    trained = Tokenizer.train([TEXT * 3, "return " * 50], vocab_size=300)
    assert 257 < trained.vocab_size <= 300
    assert trained.end_of_document == 0
    tokens = trained.encode_batch([TEXT + "\x01 never seen: ŧ"])[0]
    assert len(tokens) < len(TEXT.encode())
    assert trained.decode(tokens) == TEXT + "\x01 never seen: ŧ"
    trained.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.fingerprint == trained.fingerprint
    assert torch.equal(loaded.encode_batch([TEXT])[0], trained.encode_batch([TEXT])[0])


def test_an_unusual_end_of_documents_is_kept(tmp_path: Path) -> None:
    backend = Tokenizer.train([TEXT * 3], vocab_size=300).backend
    backend.add_special_tokens(["<|over|>"])
    usual, unusual = Tokenizer(backend), Tokenizer(backend, "<|over|>")
    assert (usual.end_of_document, unusual.end_of_document) == (0, backend.token_to_id("<|over|>"))
    assert usual.fingerprint == Tokenizer(backend, "<|endoftext|>").fingerprint != unusual.fingerprint
    for tokenizer in (unusual, usual):
        folder = tmp_path / str(tokenizer.end_of_document)
        folder.mkdir()
        tokenizer.save(folder)
        again = load_tokenizer(str(folder))
        defined = tokenizer_of_definition(tokenizer.definition)
        assert again.fingerprint == defined.fingerprint == tokenizer.fingerprint
        assert again.end_of_document == defined.end_of_document == tokenizer.end_of_document
        assert json.loads(hf_tokenizer_files(tokenizer, 8)["tokenizer.json"]) == json.loads(usual.definition)


@pytest.mark.parametrize("written", ["<|over|>", {"content": "<|over|>", "special": True}])
def test_the_end_of_a_published_tokenizer(written: object, tmp_path: Path) -> None:
    backend = Tokenizer.train([TEXT * 3], vocab_size=300).backend
    backend.add_special_tokens(["<|over|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    for eos, end in ((written, backend.token_to_id("<|over|>")), ("not in the vocabulary", 0), (None, 0)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(str(tmp_path)).end_of_document == end
    (tmp_path / "tokenizer_config.json").write_text("[no")
    assert load_tokenizer(str(tmp_path)).end_of_document == 0


def test_training_bpe_twice_gives_the_same() -> None:
    texts = [Path(__file__).read_text(), TEXT * 9]
    assert Tokenizer.train(texts, 400).fingerprint == Tokenizer.train(texts, 400).fingerprint


def test_wrong_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json.*cannot be read"):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"the content of no tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
