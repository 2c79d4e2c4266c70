"""What a dataset holds, told without reading it: other data is seen, and the same is not taken for another."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from lightning_asyncpp.data.contents import contents_of


class Holding(Dataset):
    """Shows what it is given, and must not be read."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it was read")

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")


class Filled(Holding):
    def __len__(self) -> int:
        return 9


class Stating(Holding):
    @property
    def fingerprint(self) -> str:
        return str(self.version)


class Ending(IterableDataset):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was read")


def rows(change: float = 0, count: int = 50) -> torch.Tensor:
    values = torch.arange(count * 8.0).reshape(count, 8)
    values[3, 4] += change
    return values


SHOWN: dict[str, Callable[[float], Any]] = {
    "tensors": lambda change: TensorDataset(rows(change), rows()),
    "a bfloat16 tensor": lambda change: Holding(x=rows(256 * change).bfloat16()),
    "a transposed tensor": lambda change: Holding(x=rows(change).t()),
    "an array": lambda change: Holding(x=rows(change).numpy()),
    "an array of objects": lambda change: Holding(x=np.asarray(["a", f"b{change}", object()], dtype=object)),
    "an array of text": lambda change: Holding(x=np.asarray(["a", f"b{change}"])),
    "a list of tensors": lambda change: Holding(x=[rows(), rows(change)]),
    "encodings by name": lambda change: Holding(encodings={"ids": rows(change), "mask": rows()}),
    "texts": lambda change: Holding(texts=["a line\n", f"another {change}"]),
    "samples": lambda change: Holding(samples=[("a", 0), ("b", change)]),
    "a list alone": lambda change: [rows(), rows(change)],
    "a tensor alone": lambda change: rows(change),
    "a stream of it": lambda change: Ending(rows(change)),
    "a subset": lambda change: Subset(TensorDataset(rows()), [0, 1, 2 + int(change)]),
    "a subset of other data": lambda change: Subset(TensorDataset(rows(change)), [0, 1]),
    "a range of it": lambda change: Subset(TensorDataset(rows()), range(5 + int(change))),
    "several": lambda change: ConcatDataset([TensorDataset(rows()), TensorDataset(rows(change))]),
    "one that transforms another": lambda change: Holding(dataset=TensorDataset(rows(change)), transform=str),
    "a fingerprint": lambda change: Stating(version=change, rows=rows()),
    "one of Hugging Face's": lambda change: Holding(inner=SimpleNamespace(_fingerprint=f"{change}", x=rows())),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_other_data_is_seen_and_the_same_is_the_same(kind: str) -> None:
    state = torch.get_rng_state()
    made = [SHOWN[kind](change) for change in (0, 1, 0)]
    told = [contents_of(dataset)["contents"] for dataset in made]
    assert None not in told
    assert told[0] != told[1]
    assert told[0] == told[2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "attributes",
    [
        {"reads": 7, "level": 0.5, "name": "train", "epoch": torch.tensor(3), "seen": [4]},
        {"image_cache": [torch.ones(3)], "_buffer": np.ones(3), "memory": {0: rows(), 7: rows()}},
        {"lock": object(), "transform": torch.nn.Linear(2, 2), "generator": torch.Generator().manual_seed(4)},
        {"root": "/", "url": "https://example.com/a", "pattern": "*.bin"},
    ],
    ids=["counters and settings", "caches", "others' objects", "text that names no file"],
)
def test_what_says_nothing_about_the_data(attributes: dict[str, Any]) -> None:
    assert contents_of(Holding(**attributes)) == {"contents": None, "files": None}
    plain, with_them = contents_of(Holding(x=rows())), contents_of(Holding(x=rows(), **attributes))
    assert plain == with_them


class Lazy(dict):
    """Reads what it is asked for."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("it was read")


def test_a_dictionary_that_reads_is_not_read() -> None:
    assert contents_of(Holding(data=Lazy(x=rows()))) == contents_of(Holding(data={"x": rows()}))


def test_names_of_attributes_are_their_authors() -> None:
    assert contents_of(Holding(x=rows(), y=rows(1))) == contents_of(Holding(inputs=rows(1), labels=rows()))


def test_a_fingerprint_decides_alone() -> None:
    assert contents_of(Stating(version=1, x=rows())) == contents_of(Stating(version=1, x=rows(5)))
    nested = [contents_of(Subset(Stating(version=v, x=rows()), [0, 1])) for v in (1, 2)]
    assert nested[0] != nested[1]


def test_what_was_filled_while_it_was_read() -> None:
    """A loader that is made anew around a dataset that was read: it holds what it held before."""
    dataset = Holding(x=rows(), loaded=None, seen=[])
    before = contents_of(dataset)
    dataset.loaded = rows(3)
    dataset.seen.extend([1, 2, 3])
    assert contents_of(dataset) == before == contents_of(Holding(x=rows(), loaded=None, seen=[]))


def test_what_was_filled_while_it_was_read_through_another() -> None:
    """One that is made anew around a dataset that was read."""
    dataset = Holding(x=rows(), loaded=None)
    before = contents_of(Subset(dataset, [0, 1]))
    dataset.loaded = rows(3)
    assert contents_of(Subset(dataset, [0, 1])) == before == contents_of(Subset(Holding(x=rows(), loaded=None), [0, 1]))
    assert contents_of(Subset(dataset, [0, 2])) != before
    assert contents_of(Subset(Holding(x=rows(), loaded=rows(3)), [0, 1])) != before


def test_settings_of_a_process() -> None:
    first, second = (
        {"local_rank": rank, "device": f"cuda:{rank}", "start_time": 1.7e9 + rank, "log_dir": f"logs/{rank}", "size": 3}
        for rank in range(2)
    )
    assert contents_of(Holding(settings=first)) == contents_of(Holding(settings=second))
    assert contents_of(Holding(settings=first)) != contents_of(Holding(settings={**first, "size": 4}))


def test_another_dataset_is_not_taken_for_one_that_is_gone() -> None:
    told = {contents_of(Holding(x=rows(change)))["contents"] for change in range(20)}
    assert len(told) == 20


def test_files_are_known_by_their_ends_wherever_they_lie(tmp_path: Path) -> None:
    first, moved = tmp_path / "a" / "data.bin", tmp_path / "b" / "moved.bin"
    for path in (first, moved):
        path.parent.mkdir()
    first.write_bytes(bytes(300_000))
    shutil.copy(first, moved)
    before = contents_of(Holding(path=str(first)))
    assert before["files"] is not None
    assert before == contents_of(Holding(file=moved)) == contents_of(Holding(files=[str(moved)], out=tmp_path))
    for content in (b"x" + bytes(299_999), bytes(299_999) + b"x", bytes(300_001)):
        moved.write_bytes(content)
        assert contents_of(Holding(path=moved)) != before
    moved.unlink()
    assert contents_of(Holding(path=moved, x=rows())) == {**contents_of(Holding(x=rows())), "files": None}


def test_files_of_a_list_of_samples(tmp_path: Path) -> None:
    def made(folder: str, change: bytes = b"") -> Holding:
        (tmp_path / folder).mkdir(exist_ok=True)
        samples = []
        for index in range(5):
            path = tmp_path / folder / f"{index}.png"
            path.write_bytes(b"%d" % index + change * (index == 4))
            samples.append((str(path), index))
        return Holding(samples=samples)

    assert contents_of(made("a")) == contents_of(made("b"))
    assert contents_of(made("a"))["files"] != contents_of(made("c", b"x"))["files"]


def test_files_that_a_run_writes_are_none(tmp_path: Path) -> None:
    log = tmp_path / "reads.log"
    log.write_text("one")
    assert contents_of(Holding(log=log)) == {"contents": None, "files": None}


def test_large_arrays_are_sampled(tmp_path: Path) -> None:
    shape = (200_000, 100)
    mapped = np.memmap(tmp_path / "x.bin", np.float32, "w+", shape=shape)
    mapped[0, 0], mapped[-1, -1] = 1, 2
    began = time.process_time()
    told = contents_of(Holding(x=mapped))["contents"]
    assert contents_of(Holding(x=torch.from_numpy(np.asarray(mapped)).clone()))["contents"] == told
    assert time.process_time() - began < 2
    for place in ((0, 0), (-1, -1)):
        changed = np.array(mapped)
        changed[place] = 7
        assert contents_of(Holding(x=changed))["contents"] != told
    assert contents_of(Holding(x=mapped[:-1]))["contents"] != told


def test_deep_and_wide_ones_are_bounded() -> None:
    wide: Any = [0] * 40
    for _ in range(5):
        wide = [wide] * 40
    above = Holding()
    above.dataset = above
    above.x = rows()
    began = time.process_time()
    contents_of(Holding(wide=wide))
    assert contents_of(above)["contents"] is not None
    assert time.process_time() - began < 2


def test_what_cannot_be_told_is_unknown() -> None:
    class Failing(Holding):
        @property
        def fingerprint(self) -> str:
            raise OSError("on another machine")

    for dataset in (Failing(x=rows()), object(), None, iter([1])):
        assert contents_of(dataset) == {"contents": None, "files": None}
    meta = contents_of(Holding(x=torch.empty(5, 2, device="meta")))
    assert meta != contents_of(Holding(x=torch.empty(5, 3, device="meta")))


def test_a_split_by_another_seed() -> None:
    parts = [random_split(TensorDataset(rows()), [30, 20], torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    told = [contents_of(part) for part in parts]
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (lambda inner: inner, lambda inner: Subset(inner, [2, 3])),
        (lambda inner: Subset(inner, [0, 1]), lambda inner: Subset(inner, [2, 3])),
        (lambda inner: ConcatDataset([inner]), lambda inner: ConcatDataset([inner, Subset(inner, [2, 3])])),
    ],
)
def test_a_dataset_in_another_one_holds_what_it_held_when_it_was_seen_first(
    first: Callable[[Any], Any], then: Callable[[Any], Any]
) -> None:
    """Folds of a cross-validation: reading one has filled what the next one is made of, and not on all stages."""
    read, other = (Filled(x=rows(), samples=[None] * 9) for _ in range(2))
    assert contents_of(first(read)) == contents_of(first(other))
    read.samples[3] = "read"
    assert contents_of(then(read)) == contents_of(then(other))
    assert contents_of(Subset(read, [2, 3])) != contents_of(Subset(read, [2, 4]))
    assert contents_of(Filled(x=rows(), samples=read.samples)) != contents_of(other)
