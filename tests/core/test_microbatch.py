"""Cutting batches, weighing the pieces, and telling two batches apart."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostBatch
from lightning_asyncpp.core.microbatch import (
    Slot,
    checked_weight,
    cut_batch,
    fingerprint,
    split_batch,
)
from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.errors import ConfigurationError

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


# -- leaves that are no tensors -----------------------------------------------------------------------------------


def cut(field: Any, samples: int = 5, parts: int = 2) -> list[Any]:
    """What the slots hold of a field that lies beside a tensor."""
    return [slot["field"] for slot in split_batch({"x": torch.zeros(samples, 2), "field": field}, parts) if slot]


SOME_OBJECTS = [object() for _ in range(5)]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (["a", "b", "c", "d", "e"], [["a", "b", "c"], ["d", "e"]]),
        (("a", b"b", 3, None, 0.5), [("a", b"b", 3), (None, 0.5)]),
        (SOME_OBJECTS, [SOME_OBJECTS[:3], SOME_OBJECTS[3:]]),
        ([["a"], [], ["b", "c"], ["d"] * 5, []], [[["a"], [], ["b", "c"]], [["d"] * 5, []]]),
        ([{"id": i} for i in range(5)], [[{"id": 0}, {"id": 1}, {"id": 2}], [{"id": 3}, {"id": 4}]]),
        ([Pair(i, "n") for i in range(5)], [[Pair(0, "n"), Pair(1, "n"), Pair(2, "n")], [Pair(3, "n"), Pair(4, "n")]]),
        ([("a", "b", "c", "d", "e"), ["f"] * 5], [[("a", "b", "c"), ["f"] * 3], [("d", "e"), ["f"] * 2]]),
        (Pair(["a"] * 5, {"deep": [(1, 2, 3, 4, 5)]}), [
            Pair(["a"] * 3, {"deep": [(1, 2, 3)]}), Pair(["a"] * 2, {"deep": [(4, 5)]}),
        ]),
    ],
    ids=["strings", "tuple", "objects", "ragged", "dictionaries", "named tuples", "transposed", "inside structure"],
)  # fmt: skip
def test_a_list_with_an_entry_per_sample_is_cut(field: Any, expected: list[Any]) -> None:
    pieces = cut(field)
    assert pieces == expected
    assert [type(piece) for piece in pieces] == [type(field)] * 2


@pytest.mark.parametrize(
    "field", ["abcde", ["a"] * 4, [], [[], []], ("a", 1), Pair("a", "b"), {1, 2, 3, 4, 5}, range(5)], ids=repr
)
def test_what_has_no_entry_per_sample_is_handed_on_whole(field: Any) -> None:
    assert cut(field) == [field, field]


def test_numpy_arrays_of_the_batch_are_cut() -> None:
    first, second = cut([np.arange(10).reshape(5, 2), np.array(list("abcde"))])
    assert [first[0].tolist(), second[0].tolist()] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert ["".join(first[1]), "".join(second[1])] == ["abc", "de"]
    for other in (np.arange(4), np.array(5), np.zeros((2, 5))):
        assert all(piece is other for piece in cut(other))


# -- telling batches apart ----------------------------------------------------------------------------------------


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


def test_slots_that_a_user_cuts_have_marks_of_their_own() -> None:
    """Only what they hold tells whether it was cut alike on two stages."""
    slots = cut_batch(torch.arange(4.0), 2, lambda batch, parts: list(batch.flip(0).tensor_split(parts)))
    assert [slot.fingerprint for slot in slots] == [fingerprint(torch.tensor(x)) for x in ([3.0, 2.0], [1.0, 0.0])]


def test_a_batch_is_looked_at_as_closely_as_its_microbatches() -> None:
    """Of a large tensor 1024 elements are hashed for each of them."""
    x = torch.zeros(8 * 1024)
    other = x.clone()
    other[1] = 1.0
    assert fingerprint(x) == fingerprint(other)
    assert fingerprint(x, 8) != fingerprint(other, 8)


@pytest.mark.parametrize(
    "weight", [2, 2.0, np.float32(2), torch.tensor(2), torch.tensor([[2.0]], dtype=torch.bfloat16)]
)
def test_a_weight_is_any_number(weight: Any) -> None:
    assert checked_weight(weight) == 2.0


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (None, "returned None: return one number"), (torch.ones(2), r"a tensor of shape \(2,\): return one number"),
        ("3", "returned '3'"), ([1.0], r"returned \[1.0\]"), (1j, "returned 1j"),
        (-1.0, "returned -1.0: it must be finite"), (float("nan"), "finite"), (torch.tensor(float("inf")), "finite"),
    ],
)  # fmt: skip
def test_what_is_no_weight_is_refused_with_what_was_returned(weight: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        checked_weight(weight)


def moved() -> tuple[HostBatch, dict[str, Any], dict[str, Any]]:
    """A batch, its copy, and who knows of both."""
    batch = {"x": torch.arange(6.0), "names": ["a", "b"]}
    copy = map_tensors(Tensor.clone, batch)
    known = HostBatch()
    known.moved(batch, copy)
    return known, batch, copy


def test_the_host_s_tensors_stand_in_for_their_copies() -> None:
    known, batch, copy = moved()
    copy["names"] = ["c", "d"]  # what is no tensor is as it is now
    found = known.of(copy)
    assert found["x"] is batch["x"]
    assert found["names"] == ["c", "d"]
    assert known.of([copy["x"]])[0] is batch["x"], "in whatever nesting"


@pytest.mark.parametrize(
    "change",
    [
        lambda copy: copy["x"].mul_(2),
        lambda copy: copy.update(x=copy["x"] * 2),
        lambda copy: copy.update(x=copy["x"].view(6)),
    ],
)
def test_what_was_changed_since_is_read_as_it_is(change: Callable[[Any], object]) -> None:
    known, _, copy = moved()
    change(copy)
    assert known.of(copy)["x"] is copy["x"]


def test_the_batch_before_is_forgotten_and_what_is_on_the_device_stays() -> None:
    known, _, copy = moved()
    loaded = torch.arange(3.0)  # by the loader, where it belongs
    known.moved(loaded, loaded)
    assert known.of(copy) is copy
    assert known.of(loaded) is loaded


def test_weights_and_marks_are_read_from_the_host() -> None:
    batch, on_host = torch.arange(8.0), torch.arange(8.0)
    read: list[Tensor] = []

    def weigh(microbatch: Tensor) -> float:
        read.append(microbatch)
        return float(microbatch.sum())

    slots = cut_batch(batch, 3, split_batch, weigh, on_host)
    assert [slot.weight for slot in slots] == [3.0, 12.0, 13.0]
    assert {slot.fingerprint for slot in slots} == {fingerprint(batch, 3)}
    assert {tensor.untyped_storage().data_ptr() for tensor in read} == {on_host.untyped_storage().data_ptr()}
    assert slots[0].content.data_ptr() == batch.data_ptr()


def test_a_split_of_the_user_s_is_called_once() -> None:
    calls: list[Tensor] = []

    def split(batch: Tensor, parts: int) -> list[Any]:
        calls.append(batch)
        return [*batch.tensor_split(parts - 1), None]

    batch = torch.arange(4.0)
    slots = cut_batch(batch, 3, split, lambda x: float(x.sum()), batch.clone())
    assert [slot.weight for slot in slots] == [1.0, 5.0, 0.0]
    assert slots[2] == Slot(None, fingerprint(None), 0.0)
    assert calls == [batch]
