"""Which tokens a litdata dataset streams: known wherever they lie, and in another order no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

from lightning_asyncpp.data import TextDataModule, use_replica
from lightning_asyncpp.data.stream_identity import same_stream, stream_identity
from lightning_asyncpp.strategy_parts.loader_identity import differences, differing, loader_identity
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader
from tests.data.test_text_data_module import prepared_folder, ready


def told(folder: Path, **arguments: Any) -> dict[str, Any]:
    return loader_identity(ready(folder, **arguments).train_dataloader())


def same(now: dict[str, Any], saved: dict[str, Any]) -> bool:
    json.dumps(now)
    return not differing(now, saved)


def test_the_same_tokens_wherever_they_lie(text_folder: Path, tmp_path: Path) -> None:
    here = told(text_folder)
    copy = Path(shutil.copytree(prepared_folder(text_folder), tmp_path / "copy"))
    assert told(copy) == here
    other = tmp_path / "other" / "text"
    shutil.copytree(text_folder, other)
    made_anew = told(other)  # by another machine, at another time
    assert made_anew == here
    alone = shutil.copytree(copy / "train", tmp_path / "alone")
    assert same(told(Path(alone), vocab_size=256), here)
    streamed = told(text_folder, source=f"local:{copy / 'train'}", vocab_size=256)
    assert streamed["index"] == here["index"]
    assert same(streamed, here)


def test_other_tokens(text_folder: Path, tmp_path: Path) -> None:
    here = told(text_folder)
    alone = Path(shutil.copytree(prepared_folder(text_folder) / "train", tmp_path / "alone"))
    before = told(alone, vocab_size=256)
    (chunk,) = alone.glob("chunk-*")
    content = bytearray(chunk.read_bytes())
    content[-100] ^= 1
    chunk.write_bytes(content)
    assert differing(told(alone, vocab_size=256), before) == ["chunks"]
    path = text_folder / "5.txt"
    path.write_text(path.read_text() * 2)
    changed = told(text_folder)
    assert set(differing(changed, here)) == {"index", "chunks"}
    assert differences(changed, here)[0].startswith(f"other training data (index={changed['index']}), and the check")


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"batch_size": 2}, {"batch_size"}),
        ({"seed": 1}, {"seed"}),
        ({"shuffle": False}, {"shuffle"}),
        ({"context_length": 16}, {"block_size"}),
        ({"drop_last": False}, {"drop_last"}),
        ({"num_workers": 1}, set()),
        ({"num_workers": 2}, {"num_workers"}),
        ({"shuffle": False, "seed": 1}, {"shuffle"}),
    ],
)
def test_another_order(changed: dict[str, Any], names: set[str], text_folder: Path) -> None:
    assert set(differing(told(text_folder, **changed), told(text_folder))) == names


def test_without_an_order_the_seed_decides_nothing(text_folder: Path) -> None:
    assert same(told(text_folder, shuffle=False, seed=1), told(text_folder, shuffle=False, seed=2))


def test_all_replicas_say_the_same(text_folder: Path) -> None:
    found = []
    for rank in range(2):
        data = ready(text_folder)
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            distributed_sampler_kwargs={"num_replicas": 2, "rank": rank}, lightning_module=None, global_rank=rank
        )
        found.append(loader_identity(data.train_dataloader()))
    assert found[0] == found[1]


def combined(folders: list[Path], seed: int = 3) -> StreamingDataLoader:
    parts = [StreamingDataset(str(folder), item_loader=TokensLoader(33), shuffle=True) for folder in folders]
    return StreamingDataLoader(CombinedStreamingDataset(parts, seed=seed, iterate_over_all=False), batch_size=4)


def test_several_streams(text_folder: Path, tmp_path: Path) -> None:
    ready(text_folder)
    folder = prepared_folder(text_folder)
    before = loader_identity(combined([folder / "train", folder / "val"]))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert loader_identity(combined([copy / "train", copy / "val"])) == before
    assert differing(loader_identity(combined([copy / "train", copy / "val"], seed=4)), before) == ["seed"]
    swapped = differing(loader_identity(combined([copy / "val", copy / "train"])), before)
    assert "streams[1].index" in swapped


def test_several_streams_go_on_where_they_lie_now(text_folder: Path, tmp_path: Path) -> None:
    from lightning_asyncpp.data.replica import with_own_place
    from lightning_asyncpp.strategy_parts.resumable_loader import COMBINED_GOES_ON

    if not COMBINED_GOES_ON:
        pytest.skip("this litdata does not go on in such streams")
    ready(text_folder)
    folder = prepared_folder(text_folder)
    loader = combined([folder / "train", folder / "val"])
    use_replica(loader, 1, 0)
    iterator = iter(loader)
    expected = [next(iterator) for _ in range(8)]
    again = combined([folder / "train", folder / "val"])
    use_replica(again, 1, 0)
    begun = iter(again)
    for _ in range(3):
        next(begun)
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    resumed = combined([moved / "train", moved / "val"])
    use_replica(resumed, 1, 0)
    resumed.load_state_dict(with_own_place(resumed, again.state_dict()))
    for batch, wanted in zip(resumed, expected[3:]):
        assert torch.equal(batch, wanted)


def test_another_part(text_folder: Path) -> None:
    ready(text_folder)
    folder = str(prepared_folder(text_folder) / "train")
    parts = [
        stream_identity(StreamingDataset(folder, item_loader=TokensLoader(33), subsample=share), 0)
        for share in (1.0, 1.0, 0.5)
    ]
    assert parts[0] == parts[1]
    assert parts[0]["part"] == "all"
    assert differing(parts[2], parts[0]) == ["part"]


@pytest.mark.parametrize(
    ("num_workers", "remote"),
    [
        (0, False),
        (1, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_where_its_data_lies_now(
    remote: bool, num_workers: int, text_folder: Path, tmp_path: Path
) -> None:
    ready(text_folder)
    split = prepared_folder(text_folder) / "train"

    def resumable(folder: Path, cache: str) -> ResumableLoader:
        source = f"local:{folder}" if remote else folder
        data = TextDataModule(
            str(source), vocab_size=256, context_length=32, batch_size=4, num_workers=num_workers,
            cache_dir=str(tmp_path / cache),
        )  # fmt: skip
        data.setup()
        return ResumableLoader(data.train_dataloader(), lambda: 0)

    loader = resumable(split, "one")
    whole = [batch for _ in range(2) for batch in loader]
    loader = resumable(split, "one")
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    del batches
    moved = tmp_path / "moved"
    shutil.move(split, moved)
    again = resumable(moved, "another")
    assert same(again.identity, state["identity"])
    again.resume(state, ended=False)
    rest = [batch for _ in range(2) for batch in again]
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[3:], strict=True))


def test_a_dataset_that_is_gone_is_unknown(text_folder: Path, tmp_path: Path) -> None:
    dataset = ready(text_folder).train_dataloader().dataset
    folder = prepared_folder(text_folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert same_stream(dataset, str(copy / "train")) is True
    assert same_stream(dataset, str(copy / "val")) is False
    assert same_stream(dataset, str(copy / "absent")) is None
    shutil.rmtree(folder)
    gone = stream_identity(dataset, 0)
    assert [gone[name] for name in ("index", "chunks")] == [None] * 2
    assert gone["seed"] == 42
