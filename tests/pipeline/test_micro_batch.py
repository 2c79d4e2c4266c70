"""Cutting batches, weighing the pieces, and telling two batches apart."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.micro_batch import fingerprint, number_of_samples, split_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: str = "n"


@given(st.integers(1, 40), st.integers(1, 12))
def test_slots_are_those_of_tensor_split(samples: int, parts: int) -> None:
    x = torch.arange(samples)
    expected = [piece.tolist() if piece.numel() else None for piece in torch.tensor_split(x, parts)]
    assert [None if slot is None else slot.tolist() for slot in split_batch(x, parts)] == expected


def test_nine_samples_make_eight_slots() -> None:
    """``chunk(9, 8)`` makes five."""
    assert [len(slot) for slot in split_batch(torch.arange(9), 8)] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_missing_samples_leave_empty_slots_at_the_end() -> None:
    assert [slot is None for slot in split_batch(torch.zeros(2, 3), 4)] == [False, False, True, True]
    assert split_batch(torch.zeros(0, 3), 3) == [None] * 3


def test_nested_batches_are_cut_leaf_by_leaf() -> None:
    x = torch.arange(6).view(3, 2)
    batch = {
        "pair": Pair(x, [x + 10]), "sample": Sample(x + 20), "ordered": OrderedDict(a=(x + 30,)),
        "scale": torch.tensor(2.0), "tag": "t", "number": 5, "nothing": None,
    }  # fmt: skip
    first, second = split_batch(batch, 2)
    assert first["pair"].x.tolist() == [[0, 1], [2, 3]]
    assert second["pair"].x.tolist() == [[4, 5]]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].y[0].tolist() == [[14, 15]]
    assert second["sample"] == Sample(second["sample"].x, "n")
    assert second["sample"].x.tolist() == [[24, 25]]
    assert isinstance(second["ordered"], OrderedDict)
    assert second["ordered"]["a"][0].tolist() == [[34, 35]]
    for slot in (first, second):
        assert (slot["scale"].item(), slot["tag"], slot["number"], slot["nothing"]) == (2.0, "t", 5, None)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4, 2), "mask": torch.zeros(2, 2)}, r"different first dimensions \[2, 4\]"),
        ([torch.tensor(1.0), "text"], "a batch of type list holds no tensor with a batch dimension"),
        (None, "a batch of type NoneType holds no tensor"),
    ],
    ids=["different", "scalars", "none"],
)
def test_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{message}.*define split_batch\(batch, parts\)"):
        split_batch(batch, 2)


def test_number_of_samples_is_that_of_the_first_tensor_with_dimensions() -> None:
    assert number_of_samples({"scale": torch.tensor(1.0), "x": torch.zeros(5, 2)}) == 5


def some_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(5, 4, generator=generator),
        "tokens": torch.randint(0, 100, (5, 7), generator=generator),
        "mask": torch.rand(5, generator=generator) < 0.5,
        "half": torch.randn(3, generator=generator).bfloat16(),
        "complex": torch.randn(2, generator=generator, dtype=torch.complex64),
        "scale": torch.tensor(0.5),
    }


def test_equal_batches_have_equal_fingerprints() -> None:
    mark = fingerprint(some_batch())
    assert mark == fingerprint(some_batch())
    assert 0 <= mark < 2**63
    strided = some_batch()
    strided["x"] = strided["x"].t().contiguous().t()
    assert fingerprint(strided) == mark


def test_numbers_that_are_not_a_number_are_equal_to_themselves() -> None:
    assert fingerprint(torch.tensor([float("nan")])) == fingerprint(torch.tensor([float("nan")]))


@given(st.data())
def test_any_changed_element_changes_the_fingerprint(data: st.DataObject) -> None:
    batch = some_batch()
    mark = fingerprint(batch)
    flat = batch[data.draw(st.sampled_from([name for name in batch if name != "mask"]))].view(-1)
    position = data.draw(st.integers(0, flat.numel() - 1))
    flat[position] = flat[position] * 2 + 1
    assert fingerprint(batch) != mark
    batch = some_batch()
    position = data.draw(st.integers(0, 4))
    batch["mask"][position] = ~batch["mask"][position]
    assert fingerprint(batch) != mark


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=30), st.randoms(use_true_random=False))
def test_the_order_counts(values: list[int], rng: Any) -> None:
    shuffled = list(values)
    rng.shuffle(shuffled)
    same = fingerprint(torch.tensor(values)) == fingerprint(torch.tensor(shuffled))
    assert same == (values == shuffled)


def test_shapes_and_the_order_of_tensors_count() -> None:
    x, y = torch.arange(6.0), torch.arange(6.0) + 1
    marks = [fingerprint(b) for b in (x, x.view(2, 3), x.view(3, 2), x.view(6, 1), (x, y), (y, x), (x, x), x.double())]
    assert len(set(marks)) == len(marks)


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: torch.cat([-x[:1], x[1:]])], ids=["all", "one"])
def test_signs_count(change: Any) -> None:
    x = torch.randn(6, generator=torch.Generator().manual_seed(0))
    assert fingerprint(x) != fingerprint(change(x))


def test_dtypes_count() -> None:
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(3, dtype=torch.int32))


def test_elements_are_spread_over_the_whole_tensor() -> None:
    x = torch.arange(2000)
    other = x.clone()
    other[1024:] += 1
    assert fingerprint(x) != fingerprint(other)


def test_large_tensors_are_sampled() -> None:
    x = torch.arange(1024 * 8)
    other = x.clone()
    other[-8] += 1
    assert fingerprint(x) != fingerprint(other)
