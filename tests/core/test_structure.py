"""What crosses a cut comes back as it was; what would come back as something else is refused."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_asyncpp.core.tree import flatten, unflatten
from lightning_asyncpp.errors import ConfigurationError

Pair = namedtuple("Pair", ["x", "y"])


class Marked(Tensor):
    """A tensor of a class of the user's."""


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    plain | st.integers(0, 9).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in every value and every type, and in the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


@given(trees)
def test_what_is_taken_apart_is_put_together(tree: Any) -> None:
    whole = (torch.zeros(2), tree)
    tensors, structure = flatten(whole, "layer")
    assert same(unflatten(list(tensors), structure), whole)


def test_tensors_alone_need_no_structure() -> None:
    x, y = torch.zeros(2), torch.ones(3)
    assert flatten(x, "layer") == ((x,), b"")
    assert flatten((x, y), "layer") == ((x, y), b"")
    assert unflatten([x, y], b"") == (x, y)


def test_numbers_are_exact() -> None:
    numbers = [0.1, 1e-320, math.inf, 2**70, True, -0.0]
    tensors, structure = flatten([torch.zeros(1), numbers], "layer")
    _, back = unflatten(list(tensors), structure)
    assert same(back, numbers)
    assert math.copysign(1.0, back[-1]) == -1.0


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (Pair(torch.zeros(1), 2), "the named tuple Pair"),
        ({"x": Pair(torch.zeros(1), 2)}, "the named tuple Pair"),
        (OrderedDict(x=torch.zeros(1)), "OrderedDict"),
        ((torch.zeros(1), torch.Size([2])), "Size"),
        ((torch.zeros(1), np.float32(2)), "float32"),
        ((torch.zeros(1), np.zeros(2)), "ndarray"),
        ({0: torch.zeros(1)}, "a dict with the key 0"),
        ((torch.zeros(1), object()), "object"),
        (torch.zeros(1).as_subclass(Marked), "Marked"),
        ((torch.zeros(1).as_subclass(Marked),), "Marked"),
        ("text", "str without a tensor"),
        ((None, 1), "tuple without a tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(output: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"a layer at a cut returned {text} \(layer 'blocks.3'\)"):
        flatten(output, "blocks.3")
