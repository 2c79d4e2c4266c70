"""Training on what `asyncpp prepare` wrote, through the data module."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.data import DataError, TextDataModule, use_replica
from lightning_asyncpp.tools.prepare.preparation import prepare
from tests.tools.prepare.corpus import make_texts, request, stored, write

LENGTH = 33


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve chunks of a trained vocabulary, 16-bit tokens."""
    folder = tmp_path_factory.mktemp("shards")
    source = write(folder / "source", make_texts(), "parquet")
    prepare(request(source, folder / "out", tokenizer="bpe", vocab_size=300))
    return folder / "out"


def ready(folder: Path, **arguments: Any) -> TextDataModule:
    data = TextDataModule(**{"source": str(folder), "context_length": LENGTH - 1, "batch_size": 4, **arguments})
    data.prepare_data()
    data.setup()
    return data


def rows(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in loader for row in batch.tolist()]


def windows(folder: Path, split: str) -> list[tuple[int, ...]]:
    """All windows of a split, in order: each chunk is cut anew, and its rest left out."""
    chunks = json.loads((folder / split / "index.json").read_text())["chunks"]
    tokens = stored(folder)[split == "val"]
    cut, start = [], 0
    for chunk in chunks:
        piece = tokens[start : start + chunk["dim"]]
        cut += [tuple(piece[i : i + LENGTH]) for i in range(0, len(piece) - LENGTH + 1, LENGTH)]
        start += chunk["dim"]
    return cut


def test_windows_of_both_splits(shards: Path) -> None:
    data = ready(shards, shuffle=False, drop_last=False)
    assert rows(data.train_dataloader()) == windows(shards, "train")
    assert rows(data.val_dataloader()) == windows(shards, "val")
    assert data.vocab_size == 300
    assert next(iter(data.train_dataloader())).dtype == torch.int64
    assert "漢字" in data.tokenizer.decode(torch.tensor(stored(shards)[0][:200]))


def test_every_epoch_has_every_window_in_another_order(shards: Path) -> None:
    loader = ready(shards, drop_last=False, seed=3).train_dataloader()
    first, second = rows(loader), rows(loader)
    assert Counter(first) == Counter(second) == Counter(windows(shards, "train"))
    assert first != second
    assert first == rows(ready(shards, drop_last=False, seed=3).train_dataloader())
    assert first != rows(ready(shards, drop_last=False, seed=4).train_dataloader())


def test_replicas_share_the_windows(shards: Path) -> None:
    shares = []
    for rank in range(2):
        loader = ready(shards).train_dataloader()
        use_replica(loader, 2, rank)
        shares.append(rows(loader))
    assert len(shares[0]) == len(shares[1]) > 100
    assert not set(shares[0]) & set(shares[1])
    assert set(shares[0]) | set(shares[1]) <= set(windows(shards, "train"))


@pytest.mark.parametrize("on_nfs", ["0", "1"])
def test_chunks_shorter_than_a_window_and_parallel_file_systems_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_nfs: str
) -> None:
    texts = make_texts(200)
    parts = [texts[:90], ["x"], ["y"], texts[90:160], ["z"], texts[160:]]
    for index, part in enumerate(parts):  # a piece each, since they are compressed, and so chunks of their own
        write(tmp_path / "source", part, "jsonl.gz", files=1)
        (tmp_path / "source" / "000.jsonl.gz").rename(tmp_path / "source" / f"part{index}.jsonl.gz")
    prepare(request(tmp_path / "source", tmp_path / "out", piece_mb=1e-5, val_fraction=0.0))
    monkeypatch.setenv("LITDATA_POSIX_FAST", on_nfs)  # "1" stands for what litdata finds on NFS, Lustre and others
    everything = Counter(windows(tmp_path / "out", "train"))
    assert Counter(rows(ready(tmp_path / "out", drop_last=False).train_dataloader())) == everything
    for replicas in (2, 4):
        loaders = [ready(tmp_path / "out").train_dataloader() for _ in range(replicas)]
        for rank, loader in enumerate(loaders):
            use_replica(loader, replicas, rank)
        shares = [rows(loader) for loader in loaders]
        assert {len(share) for share in shares} == {everything.total() // (4 * replicas) * 4}
        assert Counter(row for share in shares for row in share) <= everything


def test_a_loader_resumes_in_the_middle_of_an_epoch(shards: Path) -> None:
    loader = ready(shards).train_dataloader()
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    resumed = ready(shards).train_dataloader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest
    assert len(rest) > 50


def test_a_model_with_too_small_a_vocabulary_is_refused(shards: Path) -> None:
    data = TextDataModule(str(shards), context_length=LENGTH - 1)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=299, context_length=64))
    data.trainer = SimpleNamespace(lightning_module=model, distributed_sampler_kwargs=None)  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"has a vocabulary of 300 token ids, and the model only 299"):
        data.setup()
    model.config.vocab_size = 320  # rounded up, as matrices like it
    data.setup()


def test_a_tokenizer_that_is_not_there_is_known_before_the_first_checkpoint(shards: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"val_source": str(shards / "val"), "vocab_size": 300}
    data = ready(shards / "train", tokenizer=str(shards), **arguments)
    assert data.state_dict() == {"tokenizer": data.tokenizer.definition}
    assert ready(shards / "train", **arguments).state_dict() == {}
    with pytest.raises(DataError, match=r"absent\.json': there is no such file"):
        ready(shards / "train", tokenizer=str(tmp_path / "absent.json"), **arguments)


def test_checksums_are_compared_unless_told_otherwise(shards: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(shards, tmp_path / "copy"))
    chunk = copy / "train" / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match="is damaged: its CRC-32"):
        ready(copy)
    ready(copy, verify_checksums=False)
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has \d+ bytes instead of"):
        ready(copy, verify_checksums=False)


def test_a_preparation_that_has_not_ended_is_no_text(shards: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    (partial / "pieces").mkdir(parents=True)
    (partial / "plan.json").write_text("{}")
    for source in (partial, tmp_path / "out"):
        with pytest.raises(DataError, match=rf"{partial} is a preparation that has not ended; run its `asyncpp prep"):
            ready(source)
