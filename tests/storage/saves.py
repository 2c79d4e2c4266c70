"""Helpers that save checkpoints in one file or sharded, read and compare their content, or put code into it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_asyncpp.storage import commit, give_up, load, new_target, save_file, write_part


class Evil:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def content(version: int) -> dict[str, Any]:
    """Return the content of a checkpoint of two stages, with weights as large as a page or two."""
    return {
        "state_dict": {f"{layer}.weight": torch.full((40, 30), version + layer / 10) for layer in range(2)},
        "step": version,
    }


def save_full(path: str, version: int) -> None:
    save_file(content(version), Path(path))


def save_sharded(path: str, version: int) -> None:
    """Save a sharded checkpoint as the ranks of a pipeline do, one after the other."""
    whole = content(version)
    target = new_target(Path(path))
    weights = whole.pop("state_dict")
    try:
        parts = [{"state_dict": {name: weights[name]}} for name in weights]
        parts[-1] |= whole
        commit(target, dict(write_part(target, stage, part) for stage, part in enumerate(parts)))
    except BaseException:
        give_up(target)
        raise


SAVES: dict[str, Callable[[str, int], None]] = {"full": save_full, "sharded": save_sharded}


def version_of(path: Path) -> int:
    """Return the version that a checkpoint holds, and check that its whole content is bitwise that version's."""
    found = load(path)
    expected = content(found["step"])
    assert_same(found["state_dict"], expected["state_dict"])
    assert found.keys() == expected.keys()
    return found["step"]


def assert_same(one: Any, other: Any) -> None:
    """Check that two trees are bitwise equal, including types and orders."""
    (leaves, tree), (others, other_tree) = tree_flatten(one), tree_flatten(other)
    assert tree == other_tree
    assert list(map(type, leaves)) == list(map(type, others))
    for leaf, found in zip(leaves, others):
        if isinstance(leaf, Tensor):
            torch.testing.assert_close(leaf, found, rtol=0, atol=0, equal_nan=True)
        else:
            assert leaf == found
