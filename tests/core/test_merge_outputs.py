"""Joining what a step returned for the microbatches: like the result for the whole batch."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.tree import merge_outputs

Pair = namedtuple("Pair", ["x", "y"])
THING = object()


def rows(*values: float) -> Tensor:
    """A tensor of shape (values, 1)."""
    return torch.tensor(values).view(-1, 1)


def plain(tree: Any) -> Any:
    """The same nesting with lists for tensors and arrays, so that ``==`` compares."""
    if isinstance(tree, (Tensor, np.ndarray)):
        return {"tensor" if isinstance(tree, Tensor) else "array": tree.tolist()}
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, Pair):
        return Pair(*map(plain, tree))
    return type(tree)(map(plain, tree)) if isinstance(tree, (tuple, list)) else tree


def check(results: list[Any], expected: Any, weights: tuple[float, ...] = (3.0, 1.0)) -> None:
    merged = merge_outputs(results, weights)
    assert type(merged) is type(expected)
    assert plain(merged) == plain(expected)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([rows(1, 2), rows(3)], rows(1, 2, 3)),
        ([torch.ones(1), torch.zeros(1)], torch.tensor([1.0, 0.0])),
        ([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(2.0)),
        ([torch.zeros(0), rows(3)], rows(3)),
        ([np.arange(2), np.arange(1)], np.array([0, 1, 0])),
        ([1.0, 5.0], 2.0),
        ([1, 5.0], 2.0),
        ([np.float32(1), np.float64(5)], 2.0),
    ],
    ids=["rows", "one element", "no dimensions", "nothing found", "arrays", "floats", "integer", "numpy numbers"],
)  # fmt: skip
def test_tensors_and_numbers(results: list[Any], expected: Any) -> None:
    check(results, expected)


@pytest.mark.parametrize(
    "results",
    [
        ["a", "b"], [True, False], [None, 1.0], [THING, THING], [torch.tensor(1.0), 2.0], [rows(1), torch.tensor(1.0)],
        [{"a": 1}, None], [["a"], ("b",)], [np.array(1), np.array(2)],
    ],
    ids=["strings", "booleans", "none", "objects", "number", "dimensions", "mapping", "sequences", "arrays"],
)  # fmt: skip
def test_anything_else_comes_as_the_list_of_results(results: list[Any]) -> None:
    check(results, results)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensors", "arrays"])
def test_padding_to_the_longest_of_each_microbatch(make: Any) -> None:
    """They do not fit together: the caller gets them as they are."""
    results = [{"logits": make((2, 5)), "loss": 1.0}, {"logits": make((1, 7)), "loss": 5.0}]
    check(results, {"logits": [make((2, 5)), make((1, 7))], "loss": 2.0})


def test_averages_are_detached_and_exact_for_one_microbatch() -> None:
    loss = torch.tensor(0.1, requires_grad=True)
    assert merge_outputs([loss], [7.0]).requires_grad is False
    assert merge_outputs([loss], [8.0]).item() == loss.item()
    assert merge_outputs([0.1], [8.0]) == 0.1


@pytest.mark.parametrize("results", [[], [None], [None, None]], ids=repr)
def test_nothing(results: list[Any]) -> None:
    assert merge_outputs(results, [1.0] * len(results)) is None


# -- lists and tuples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([["a", "b"], ["c", "d"]], ["a", "b", "c", "d"]),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([("a", "b"), ("c",)], ("a", "b", "c")),
        ([[1, 2.0], [True]], [1, 2.0, True]),
        ([[None], [THING]], [None, THING]),
        ([[["a"], []], [["b", "c"]]], [["a"], [], ["b", "c"]]),
        ([[{"id": 1}], [{"id": 2}]], [{"id": 1}, {"id": 2}]),
        ([[Pair(1, "a")], [Pair(2, "b")]], [Pair(1, "a"), Pair(2, "b")]),
        ([[], []], []),
        ([[], ["a"]], ["a"]),
    ],
    ids=["equal", "unequal", "tuples", "numbers", "objects", "lists", "dictionaries", "named tuples", "empty", "one"],
)  # fmt: skip
def test_lists_without_tensors_are_concatenated(results: list[Any], expected: Any) -> None:
    check(results, expected)


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_tensors_are_merged_entry_by_entry(kind: type) -> None:
    results = [kind([rows(1, 2), ["a", "b"], "s", 1.0]), kind([rows(3), ["c"], "t", 5.0])]
    check(results, kind([rows(1, 2, 3), ["a", "b", "c"], ["s", "t"], 2.0]))
    check(
        [kind([{"deep": [rows(1)]}, "s"]), kind([{"deep": [rows(3)]}, "t"])], kind([{"deep": [rows(1, 3)]}, ["s", "t"]])
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_tensors_of_different_lengths_are_concatenated(kind: type) -> None:
    """One tensor per sample."""
    check([kind([rows(1), rows(2, 3)]), kind([rows(4)])], kind([rows(1), rows(2, 3), rows(4)]))
    check([kind([]), kind([rows(4)])], kind([rows(4)]))


# -- mappings -----------------------------------------------------------------------------------------------------


def test_mappings_are_merged_key_by_key() -> None:
    results = [OrderedDict(y=rows(1, 2), name=["a", "b"], n=None), OrderedDict(y=rows(3), name=["c"], n=None)]
    check(results, {"y": rows(1, 2, 3), "name": ["a", "b", "c"], "n": None})


def test_keys_that_not_every_microbatch_has() -> None:
    """Averaged with the weights of those that have them; in the order in which they come up."""
    results = [{"a": 1.0}, {"b": rows(1), "a": 5.0}, {"c": "s", "b": rows(2)}]
    merged = merge_outputs(results, [3.0, 1.0, 4.0])
    assert list(merged) == ["a", "b", "c"]
    assert plain(merged) == plain({"a": 2.0, "b": rows(1, 2), "c": ["s"]})


def test_what_has_no_weight_is_left_out_of_averages_but_not_of_predictions() -> None:
    losses = torch.tensor([float("nan"), 3.0])
    results = [{"loss": losses[0], "p": torch.zeros(2)}, {"loss": losses[1], "p": torch.ones(2)}]
    merged = merge_outputs(results, [0.0, 4.0])
    assert float(merged["loss"]) == 3.0
    assert merged["p"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert merge_outputs([1.0, 3.0], [0.0, 0.0]) == 2.0
