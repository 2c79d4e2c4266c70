"""Batches are cut into weighted microbatches and told apart by fingerprints; results of microbatches are merged."""

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
from lightning_asyncpp.core.microbatch import checked_weight, cut_batch, fingerprint, split_batch
from lightning_asyncpp.core.tree import map_tensors, merge_outputs
from lightning_asyncpp.errors import ConfigurationError

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: str = "n"


@given(st.integers(1, 40), st.integers(1, 12))
def test_slots_are_those_of_tensor_split(samples: int, parts: int) -> None:
    """With eight parts, nine samples fill eight slots; ``chunk`` would fill five. Lists are cut at the same places."""
    x = torch.arange(samples)
    expected = [piece.tolist() if piece.numel() else None for piece in torch.tensor_split(x, parts)]
    assert [None if slot is None else slot.tolist() for slot in split_batch(x, parts)] == expected
    slots = split_batch({"x": x, "names": x.tolist()}, parts)
    assert [None if slot is None else slot["x"].tolist() for slot in slots] == expected
    assert [None if slot is None else slot["names"] for slot in slots] == expected


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


# -- leaves that are not tensors ----------------------------------------------------------------------------------


def cut(field: Any, samples: int = 5, parts: int = 2) -> list[Any]:
    """Return the pieces, by slot, of a field that is in a batch beside a tensor."""
    return [slot["field"] for slot in split_batch({"x": torch.zeros(samples, 2), "field": field}, parts) if slot]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (["a", "b", "c", "d", "e"], [["a", "b", "c"], ["d", "e"]]),
        ([["a"], [], ["b", "c"], ["d"] * 5, []], [[["a"], [], ["b", "c"]], [["d"] * 5, []]]),
        ([("a", "b", "c", "d", "e"), ["f"] * 5], [[("a", "b", "c"), ["f"] * 3], [("d", "e"), ["f"] * 2]]),
    ],
    ids=["strings", "ragged", "transposed"],
)  # fmt: skip
def test_a_list_with_an_entry_per_sample_is_cut(field: Any, expected: list[Any]) -> None:
    pieces = cut(field)
    assert pieces == expected
    assert [type(piece) for piece in pieces] == [type(field)] * 2


@pytest.mark.parametrize("field", ["abcde", ["a"] * 4, [], ("a", 1), Pair("a", "b"), range(5)], ids=repr)
def test_what_has_no_entry_per_sample_is_handed_on_whole(field: Any) -> None:
    assert cut(field) == [field, field]


def test_numpy_arrays_of_the_batch_are_cut() -> None:
    first, second = cut([np.arange(10).reshape(5, 2), np.array(list("abcde"))])
    assert [first[0].tolist(), second[0].tolist()] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert ["".join(first[1]), "".join(second[1])] == ["abc", "de"]
    for other in (np.arange(4), np.array(5), np.zeros((2, 5))):
        assert all(piece is other for piece in cut(other))


X = torch.arange(2000.0)


def changed(tensor: Tensor, place: int, change: float = 1.0) -> Tensor:
    other = tensor.clone()
    other[place] += change
    return other


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"x": X[::2], "scale": torch.tensor(0.5)}, {"x": X[::2].clone(), "scale": torch.tensor(0.5)}, True),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (X.view(40, 50).t(), X.view(40, 50).t().contiguous(), True),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2]), False),
        (X, X.view(40, 50), False),
        (X, X.double(), False),
        (X, torch.cat([X[:1024], X[1024:] + 1]), False),
        (torch.zeros(8 * 1024), changed(torch.zeros(8 * 1024), -8), False),
    ],
    ids=["equal", "nan", "strides", "order", "shape", "dtype", "spread", "sampled"],
)
def test_fingerprints(one: Any, other: Any, alike: bool) -> None:
    assert 0 <= fingerprint(one) < 2**63
    assert (fingerprint(one) == fingerprint(other)) == alike


@pytest.mark.parametrize(
    "weight", [2, 2.0, np.float32(2), torch.tensor(2), torch.tensor([[2.0]], dtype=torch.bfloat16)]
)
def test_a_weight_is_any_number(weight: Any) -> None:
    assert checked_weight(weight) == 2.0


@pytest.mark.parametrize("weight", [None, torch.ones(2), "3", -1.0, float("nan"), torch.tensor(float("inf"))])
def test_what_is_no_weight_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigurationError, match="microbatch_weight"):
        checked_weight(weight)


def moved() -> tuple[HostBatch, dict[str, Any], dict[str, Any]]:
    """Return a record of a copied batch, the batch, and its copy."""
    batch = {"x": torch.arange(6.0), "names": ["a", "b"]}
    copy = map_tensors(Tensor.clone, batch)
    known = HostBatch()
    known.moved(batch, copy)
    return known, batch, copy


def test_the_host_s_tensors_stand_in_for_their_copies() -> None:
    known, batch, copy = moved()
    copy["names"] = ["c", "d"]  # values other than tensors are those of the copy
    found = known.of(copy)
    assert found["x"] is batch["x"]
    assert found["names"] == ["c", "d"]
    assert known.of([copy["x"]])[0] is batch["x"], "in whatever nesting"


@pytest.mark.parametrize("change", [lambda copy: copy["x"].mul_(2), lambda copy: copy.update(x=copy["x"].view(6))])
def test_what_was_changed_since_is_read_as_it_is(change: Callable[[Any], object]) -> None:
    known, _, copy = moved()
    change(copy)
    assert known.of(copy)["x"] is copy["x"]


def test_weights_and_marks_are_read_from_the_host() -> None:
    batch, on_host = torch.zeros(8), torch.arange(8.0)
    slots = cut_batch(batch, 3, split_batch, lambda microbatch: float(microbatch.sum()), on_host)
    assert [slot.weight for slot in slots] == [3.0, 12.0, 13.0]
    assert {slot.fingerprint for slot in slots} == {fingerprint(on_host, 3)}
    assert slots[0].content.tolist() == [0.0, 0.0, 0.0]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values).view(-1, 1)


THING = object()
MERGED: dict[str, tuple[list[Any], Any]] = {  # results of microbatches of weights 3 and 1, and their merge
    "rows": ([tensor(1, 2), tensor(3)], tensor(1, 2, 3)),
    "no dimensions": ([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(2.0)),
    "arrays": ([np.arange(2), np.arange(1)], np.array([0, 1, 0])),
    "objects": ([THING, None], [THING, None]),
    "padded differently": ([torch.zeros(2, 5), torch.zeros(1, 7)], [torch.zeros(2, 5), torch.zeros(1, 7)]),
    "tensors in lists": (
        [[tensor(1, 2), ["a"], "s", 1.0], [tensor(3), ["b"], "t", 5.0]], [tensor(1, 2, 3), ["a", "b"], ["s", "t"], 2.0],
    ),
    "a tensor per sample": ([[tensor(1), tensor(2, 3)], [tensor(4)]], [tensor(1), tensor(2, 3), tensor(4)]),
    "named tuples": ([Pair(tensor(1), ["a"]), Pair(tensor(2), ["b"])], Pair(tensor(1, 2), ["a", "b"])),
    "keys": ([{"y": tensor(1), "n": "a"}, {"y": tensor(3), "z": 1.0}], {"y": tensor(1, 3), "n": ["a"], "z": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_results_are_joined(name: str) -> None:
    results, expected = MERGED[name]
    merged = merge_outputs(results, (3.0, 1.0))
    assert type(merged) is type(expected)
    assert repr(merged) == repr(expected)


def test_what_has_no_weight_is_left_out_of_averages_but_not_of_predictions() -> None:
    losses = torch.tensor([float("nan"), 3.0])
    results = [{"loss": losses[0], "p": torch.zeros(2)}, {"loss": losses[1], "p": torch.ones(2)}]
    merged = merge_outputs(results, [0.0, 4.0])
    assert float(merged["loss"]) == 3.0
    assert merged["p"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert merge_outputs([1.0, 3.0], [0.0, 0.0]) == 2.0
