"""Checkpoints that tests save, in one file and sharded, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.nested import merged, take_apart
from lightning_asyncpp.storage.sharded import commit, give_up, new_target, shard_name, write_shard
from lightning_asyncpp.storage.whole import save_file


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
    try:
        skeletons, shards = [], []
        for stage in range(2):
            part = {"state_dict": {f"{stage}.weight": whole["state_dict"][f"{stage}.weight"]}}
            skeleton, tensors = take_apart(part, shard_name(stage))
            skeletons.append(skeleton)
            shards.append(write_shard(target, shard_name(stage), tensors))
        commit(target, shards, {"step": version, **merged(skeletons)}, {"num_stages": 2})
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
