"""Nested content taken apart and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_asyncpp.storage.nested import (
    STORED,
    entries_of,
    entry_bytes,
    entry_dtype,
    merged,
    put_together,
    shard_of,
    stored_in,
    take_apart,
)
from tests.storage.same import assert_same


def again(tree: Any) -> Any:
    skeleton, tensors = take_apart(tree, "here")
    assert not any(isinstance(value, Tensor) for value in flat(skeleton))
    return put_together(skeleton, lambda entry: tensors[entry[STORED]])


def flat(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [leaf for child in node.values() for leaf in flat(child)]
    if isinstance(node, (list, tuple)):
        return [leaf for child in node for leaf in flat(child)]
    return [node]


TENSORS = [
    torch.arange(6.0).reshape(2, 3), torch.tensor(3), torch.zeros(0, 4), torch.arange(6.0).reshape(2, 3).t(),
    torch.ones(3, dtype=torch.bfloat16), torch.tensor([True]), torch.zeros(2, dtype=torch.complex64),
]  # fmt: skip
LEAVES = st.sampled_from([*TENSORS, None, 1, 2.5, "text", b"bytes", torch.float16])
KEYS = st.sampled_from([1, "1", "a", "a/b", "", 2.0, None, True, "~"])
TREES = st.recursive(
    LEAVES,
    lambda child: (
        st.lists(child, max_size=3) | st.lists(child, max_size=3).map(tuple) | st.dictionaries(KEYS, child, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=15)
@given(TREES)
def test_any_tree_comes_back(tree: Any) -> None:
    assert_same(again(tree), tree)


def test_names_are_paths_and_differ_for_keys_that_look_alike() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    skeleton, tensors = take_apart({"a": {1: one, "1": other}, "b": [torch.zeros(2)]}, "s")
    assert list(tensors) == ["a/1", "a/1~", "b/0"]
    assert tensors["a/1~"] is not other  # detached
    assert torch.equal(put_together(skeleton, lambda entry: tensors[entry[STORED]])["a"]["1"], other)


def test_one_tensor_at_two_places_is_stored_once_and_is_one_again() -> None:
    shared, view = torch.zeros(4), torch.arange(4.0)
    skeleton, tensors = take_apart({"a": shared, "b": [shared], "c": view, "d": view[:2], "e": view[2:]})
    assert len(tensors) == 4
    assert skeleton["a"][STORED] == skeleton["b"][0][STORED]
    assert torch.equal(tensors["e"], torch.tensor([2.0, 3.0]))


def test_empty_tensors_are_not_taken_for_one_another() -> None:
    tree = {"a": torch.zeros(0, 3), "b": torch.zeros(0, 2, dtype=torch.int64), "c": torch.zeros(0, 3)}
    assert_same(again(tree), tree)


def test_parameters_are_detached() -> None:
    _, tensors = take_apart({"p": torch.nn.Parameter(torch.ones(2))})
    assert not tensors["p"].requires_grad


@pytest.mark.parametrize("tree", [{STORED: 1}, {"a": [{"b": {STORED: "x", "y": torch.ones(1)}}]}])
def test_the_reserved_key_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match=f"has the key '{STORED}'"):
        take_apart(tree)


def test_entries() -> None:
    skeleton, _ = take_apart({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, "s")
    (entry,) = entries_of(skeleton)
    assert (shard_of(entry), entry_dtype(entry), entry_bytes(entry)) == ("s", torch.bfloat16, 12)
    moved = stored_in(entry, "t")
    assert (shard_of(moved), shard_of(entry)) == ("t", "s")
    for wrong in ("Tensor", "nothing"):
        with pytest.raises(ValueError, match="is no dtype of torch"):
            entry_dtype({**entry, "dtype": wrong})


def test_merged() -> None:
    """Dictionaries by keys, lists of one length by places; entries are whole, and the last one counts."""
    one, _ = take_apart({"a": {"x": torch.zeros(1)}, "l": [{"p": 1}, {"q": 2}], "n": 1, "o": [1]}, "one")
    two, _ = take_apart({"a": {"x": torch.zeros(1), "y": 3}, "l": [{"r": 1}, {"q": 4}], "n": 2, "o": [1, 2]}, "two")
    both = merged([one, two])
    assert shard_of(both["a"]["x"]) == "two"
    assert both["a"]["y"] == 3
    assert both["l"] == [{"p": 1, "r": 1}, {"q": 4}]
    assert (both["n"], both["o"]) == (2, [1, 2])
    assert "y" not in one["a"]
