"""Stages of one replica read the same batches, and replicas read different ones, also in real processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

from lightning_asyncpp.data import TextDataModule, use_replica
from tests.data.test_text_data_module import prepared_folder, ready
from tests.helpers.pool import Pools

EPOCHS = 2


def text_module(folder: Path, replica: int, replicas: int, num_workers: int = 0, **arguments: Any) -> TextDataModule:
    data = ready(folder, num_workers=num_workers, **arguments)
    sampler = {"num_replicas": replicas, "rank": replica}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler, lightning_module=None, global_rank=0)  # type: ignore[assignment]
    return data


def read(folder: Path) -> tuple[list[Any], tuple[int, int, int]]:
    """Return the epochs of this rank, the lengths of its two loaders, and the number of validation batches."""
    data = text_module(folder, dist.get_rank() // 2, 2)
    loader, val_loader = data.train_dataloader(), data.val_dataloader()
    epochs = [torch.cat(list(loader)).tolist() for _ in range(EPOCHS)]
    return epochs, (len(loader), len(val_loader), sum(1 for _ in val_loader))


def test_two_stages_of_two_replicas(pools: Pools, text_folder: Path) -> None:
    ready(text_folder)  # prepared in advance, as the launcher's first process does
    epochs, lengths = zip(*pools.run(4, read, text_folder))
    assert len(set(lengths)) == 1
    train_length, val_length, val_batches = lengths[0]
    assert val_length == val_batches > 0
    for epoch in range(EPOCHS):
        first, same, second, same_as_second = (rank_epochs[epoch] for rank_epochs in epochs)
        assert first == same
        assert second == same_as_second
        assert len(first) == len(second) == train_length * 4
        assert not {tuple(sample) for sample in first} & {tuple(sample) for sample in second}
    assert epochs[0][0] != epochs[0][1]


def test_existing_loader_and_combination(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(text_folder)
    folder = str(prepared_folder(text_folder) / "train")
    monkeypatch.setenv("WORLD_SIZE", "8")

    def dataset() -> StreamingDataset:
        return StreamingDataset(folder, item_loader=TokensLoader(33))

    loader = StreamingDataLoader(dataset(), batch_size=4)
    before = len(loader)
    use_replica(loader, 2, 1)
    assert 3 * before < len(loader) == sum(1 for _ in loader)
    combination = CombinedStreamingDataset([dataset(), dataset()], iterate_over_all=True)
    use_replica(combination, 2, 1)
    assert all(len(part) > 3 * before * 4 for part in combination._datasets)


@pytest.mark.parametrize(("num_workers", "remote"), [(0, True), (1, False)], ids=["remote", "a worker"])
def test_resumes_in_the_middle_of_an_epoch(
    text_folder: Path, num_workers: int, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # two stages of two replicas; litdata by itself would divide the data by four
    ready(text_folder)
    folder = prepared_folder(text_folder) / "train"

    def loader(cache: str) -> Any:
        source = {"source": f"local:{folder}", "cache_dir": str(text_folder.parent / cache)} if remote else {}
        return text_module(text_folder, 1, 2, num_workers, **source).train_dataloader()

    whole = loader("one")
    expected = [batch for _ in range(2) for batch in whole]
    state = None
    for part in range(2):  # the second interrupted run was itself resumed
        interrupted = loader("one")
        if state is not None:
            interrupted.load_state_dict(state)
        iterator = iter(interrupted)
        for position in range(3):
            assert torch.equal(next(iterator), expected[3 * part + position])
        state = interrupted.state_dict()
    resumed = loader("another")
    resumed.load_state_dict(state)
    rest = [batch for _ in range(2) for batch in resumed]
    assert all(torch.equal(a, b) for a, b in zip(rest, expected[6:], strict=True))


def test_incomplete_batches_with_several_replicas(text_folder: Path) -> None:
    """Incomplete batches are left out even with ``drop_last=False``, so that all replicas have equally many batches."""
    loaders = [text_module(text_folder, rank, 2, rank, drop_last=False).train_dataloader() for rank in range(2)]
    assert len({len(list(loader)) for loader in loaders}) == 1


def test_sequences_in_the_same_order_on_all_file_systems(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from litdata.streaming import dataset as litdatas
    from litdata.streaming.posix_fast import PosixFastProfile

    monkeypatch.setattr(litdatas, "detect_posix_fast", lambda *_, **__: PosixFastProfile(kind="lustre"))
    assert PosixFastProfile(kind="lustre").window_shuffle
    assert not ready(text_folder).train_dataloader().dataset.posix_fast.window_shuffle
