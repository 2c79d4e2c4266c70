"""Checkpoints that tests save, in one file and sharded, what they hold, and comparing it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.storage import commit, give_up, load, new_target, save_file, write_part


def content(version: int) -> dict[str, Any]:
    """Of two stages, as large as a page or two."""
    return {
        "state_dict": {f"{layer}.weight": torch.full((40, 30), version + layer / 10) for layer in range(2)},
        "step": version,
    }


def save_full(path: str, version: int) -> None:
    save_file(content(version), Path(path))


def save_sharded(path: str, version: int) -> None:
    """As the ranks of a pipeline do, one after the other."""
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


def in_background(save: Callable[[str, int], None], path: str, version: int) -> None:
    """In a thread, as with ``async_checkpoints``."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(save, path, version).result()


SAVES: dict[str, Callable[[str, int], None]] = {
    "full": save_full,
    "sharded": save_sharded,
    "full behind": partial(in_background, save_full),
    "sharded behind": partial(in_background, save_sharded),
}


def version_of(path: Path) -> int:
    """Which version a checkpoint holds, all of it, bit for bit."""
    found = load(path)
    version = int(found["step"])
    expected = content(version)
    assert found.keys() == expected.keys()
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], tensor), name
    return version


def assert_same(one: Any, other: Any) -> None:
    """Equal to the last bit, types and orders included."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other):
            assert_same(*pair)
    else:
        assert one == other
