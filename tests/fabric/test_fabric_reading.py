"""A loop over Fabric that is resumed reads on where it was."""

from __future__ import annotations

import gc
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_asyncpp.fabric.checkpoint import FabricLoader
from lightning_asyncpp.strategy_parts.stage_loader import stage_loader
from tests.fabric.read_runs import EPOCHS, RUN, read_and_train
from tests.helpers.pool import Pools
from tests.helpers.resumable import training_loader, write_litdata


def fabric_loader(kind: str, folder: str = "", **changed: Any) -> FabricLoader:
    torch.manual_seed(3)
    loader = training_loader(replace(RUN, **changed), kind, folder)
    return FabricLoader(stage_loader(loader, 1, 0, needs_data=True))


MID_EPOCH, ENDS = ["1", "5"], ["3", "6", "epoch-1", "epoch-2"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "stages", "at"),
    [
        pytest.param("stateful", 3, MID_EPOCH + ENDS, marks=SLOW),
        ("litdata", 3, MID_EPOCH + ENDS),
        ("stateful own", 1, MID_EPOCH + ENDS),
        ("plain", 2, ENDS),
        pytest.param("stateful own", 3, MID_EPOCH + ENDS, marks=SLOW),
        pytest.param("stateful workers", 3, MID_EPOCH + ENDS, marks=SLOW),
        pytest.param("litdata workers", 3, MID_EPOCH + ENDS, marks=SLOW),
    ],
)
def test_resumed_anywhere(kind: str, stages: int, at: list[str], pools: Pools, tmp_path: Path) -> None:
    """All stages have as many batches, the middle ones too, and what is read and computed is that of the whole run."""
    write_litdata(tmp_path / "data", RUN.samples)
    arguments = (kind, str(tmp_path / "data"), str(tmp_path))
    whole = pools.run(stages, read_and_train, *arguments)
    read = [number for batch in whole[0]["numbers"] for number in batch]
    epochs = [read[e * RUN.samples : (e + 1) * RUN.samples] for e in range(EPOCHS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(RUN.samples))] * EPOCHS
    assert len(set(map(tuple, epochs))) == EPOCHS, "each is shuffled anew"
    per_epoch = len(whole[0]["numbers"]) // EPOCHS
    for name in at:
        done = per_epoch * int(name[-1]) if name.startswith("epoch") else int(name)
        for found, expected in zip(pools.run(stages, read_and_train, *arguments, name), whole):
            for part in ("numbers", "losses"):
                assert found[part] == expected[part][done:], (part, name)
            assert found["weights"].keys() == expected["weights"].keys()
            assert all(np.array_equal(found["weights"][n], array) for n, array in expected["weights"].items())


def test_a_plain_loader_begins_its_epoch_again(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, read_and_train, "plain", "", str(tmp_path))
    found = pools.run(2, warned_of, "plain", "", str(tmp_path), "2")
    assert len(found[0]) == 1
    assert "a DataLoader cannot save its position" in found[0][0]
    assert not found[1]


def warned_of(*arguments: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_and_train(*arguments)
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "not read as without the interruption" in text]


@pytest.mark.parametrize("kind", ["stateful own", "stateful"])
def test_saved_again_before_a_batch_was_read(kind: str) -> None:
    """In mid-epoch, at an epoch's last batch and between epochs."""
    for taken in (2, 3):
        loader = fabric_loader(kind)
        batches = iter(loader)
        read = [next(batches)["number"].tolist() for _ in range(taken)]
        saved = [loader.state_dict()]
        read += [batch["number"].tolist() for batch in batches]
        saved.append(loader.state_dict())
        following = [batch["number"].tolist() for batch in loader]
        for state, rest in zip(saved, (read[taken:], following)):
            again = fabric_loader(kind)
            again.load_state_dict(state)
            once_more = fabric_loader(kind)
            once_more.load_state_dict(again.state_dict())
            assert [batch["number"].tolist() for batch in once_more] == rest
        once_more = fabric_loader(kind)
        once_more.load_state_dict(saved[0])
        for _ in once_more:
            pass
        assert [batch["number"].tolist() for batch in once_more] == following


def test_an_iteration_that_is_given_up_late_ends_no_newer_one() -> None:
    loader = fabric_loader("stateful own")
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    del first
    gc.collect()
    assert not loader.state_dict()["is_over"]
    del second
    gc.collect()
    assert loader.state_dict()["is_over"]


def test_moved_data(tmp_path: Path) -> None:
    write_litdata(tmp_path / "data", RUN.samples)
    loader = fabric_loader("litdata", str(tmp_path / "data"))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch["number"].tolist() for batch in batches]
    shutil.move(tmp_path / "data", tmp_path / "moved")
    again = fabric_loader("litdata", str(tmp_path / "moved"))
    again.load_state_dict(state)
    assert [batch["number"].tolist() for batch in again] == rest
