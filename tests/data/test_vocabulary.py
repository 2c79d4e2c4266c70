"""Token ids outside the vocabulary end with an error that names them, wherever the data comes from."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from litdata import TokensLoader
from litdata.streaming import Cache

from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.data.token_dataset import CheckedTokens


@pytest.fixture(scope="module")
def raw_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that others wrote: 64 sequences of 9 tokens, padding among them, and one id of 700."""
    folder = tmp_path_factory.mktemp("others") / "raw"
    cache = Cache(str(folder), chunk_bytes=2**20, item_loader=TokensLoader())
    tokens = torch.arange(64 * 9, dtype=torch.int32) % 256
    tokens[30], tokens[40] = 700, -100
    cache[0] = tokens
    cache.done()
    cache.merge()
    return folder


def read(source: Path, model: int | None = None, **arguments: Any) -> list[torch.Tensor]:
    """All training batches, with a trainer whose model knows ``model`` ids."""
    data = TextDataModule(**{"source": str(source), "context_length": 8, "batch_size": 4, **arguments})
    if model is not None:
        attached = SimpleNamespace(config=SimpleNamespace(vocab_size=model))
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            lightning_module=attached, distributed_sampler_kwargs=None, global_rank=0
        )
    data.prepare_data()
    data.setup()
    return list(data.train_dataloader())


@pytest.mark.parametrize(
    "given", [{"model": 256}, {"model": 256, "num_workers": 1}, {"model": 1000, "vocab_size": 256, "num_workers": 1}]
)
def test_dataset_of_others_with_ids_outside_the_vocabulary(raw_folder: Path, given: dict[str, int]) -> None:
    with pytest.raises(DataError) as caught:
        read(raw_folder, **given)
    message = str(caught.value)
    assert f"{raw_folder} holds a sequence with token id 700, and the vocabulary has 256 ids (0 ... 255)" in message
    assert "name the right dataset, or set vocab_size, the data's and the model's, to at least 701" in message


@pytest.mark.parametrize("given", [{}, {"model": 701}, {"vocab_size": 701}])
def test_ids_within_the_vocabulary_and_padding_pass(raw_folder: Path, given: dict[str, int]) -> None:
    batches = torch.cat(read(raw_folder, **given))
    assert batches.dtype == torch.int64
    assert (int(batches.max()), int(batches.min())) == (700, -100)


def test_streamed_dataset(raw_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token id 700"):
        read(f"local:{raw_folder}", model=256, cache_dir=str(tmp_path / "cache"))  # type: ignore[arg-type]


def test_damaged_folder_that_was_prepared(text_folder: Path) -> None:
    cache = text_folder.parent / "cache"
    given = {"tokenizer": "bpe", "vocab_size": 300, "cache_dir": str(cache)}
    data = TextDataModule(**{"source": str(text_folder), "context_length": 8, "batch_size": 4, **given})
    data.prepare_data()
    data.setup()
    folder = next(cache.iterdir())
    chunk = next((folder / "train").glob("chunk-*"))
    content = bytearray(chunk.read_bytes())
    content[-256:] = b"\xff" * 256
    chunk.write_bytes(content)  # after setup() compared the checksums
    with pytest.raises(DataError, match="token id 65535, and the vocabulary has") as caught:
        list(data.train_dataloader())
    assert f"delete {folder} and have it prepared again" in str(caught.value)
    # The same chunks by themselves are a dataset of others: nobody knows that deleting the folder would help.
    with pytest.raises(DataError, match="name the right dataset"):
        read(folder / "train", model=256)


def test_check_survives_pickling() -> None:
    check = pickle.loads(pickle.dumps(CheckedTokens("folder", 5, Path("prepared"))))
    assert check(torch.tensor([4, 0], dtype=torch.uint16)).tolist() == [4, 0]
    with pytest.raises(DataError, match=r"token id 5, .* 5 ids \(0 \.\.\. 4\); it is damaged: delete prepared"):
        check(torch.tensor([5, 0], dtype=torch.uint16))
