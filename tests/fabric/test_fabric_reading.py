"""A loop over Fabric that is resumed reads on where it was."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric import loader as loader_module
from lightning_asyncpp.fabric.loader import FabricLoader
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderLoader
from tests.fabric.read_runs import EPOCHS, RUN, read_and_train
from tests.trainer.checkpoint.resumable import training_loader, write_litdata
from tests.trainer.pool import Pools


def fabric_loader(kind: str, folder: str = "", **changed: Any) -> FabricLoader:
    torch.manual_seed(3)
    loader = training_loader(replace(RUN, **changed), kind, folder)
    return FabricLoader(PlaceholderLoader(loader) if "middle" in kind else loader)


MID_EPOCH, ENDS = ["1", "5"], ["3", "6", "epoch-1", "epoch-2"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "stages", "at"),
    [
        pytest.param("stateful", 3, MID_EPOCH + ENDS, marks=SLOW),
        ("litdata", 3, MID_EPOCH + ENDS),
        ("stateful own", 1, MID_EPOCH + ENDS),
        ("stateful own emulated", 1, MID_EPOCH + ENDS),
        pytest.param("plain", 2, ENDS, marks=pytest.mark.slow),
        ("plain generator own", 1, ENDS),
        pytest.param("litdata emulated", 1, MID_EPOCH + ENDS, marks=SLOW),
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("plain", "a DataLoader cannot go on in the middle of an epoch: batches would be seen twice"),
        pytest.param(
            "stateful weighted", "around which Lightning put its own, does not say where it was", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_go_on_in_mid_epoch(kind: str, said: str, pools: Pools, tmp_path: Path) -> None:
    pools.run(3, read_and_train, kind, "", str(tmp_path))
    for outcome in pools.outcomes(3, read_and_train, kind, "", str(tmp_path), "2"):
        assert outcome.error == "ConfigurationError"
        assert said in outcome.message


def test_what_fabric_was_given_is_not_what_is_saved(pools: Pools, tmp_path: Path) -> None:
    for outcome in pools.outcomes(3, read_and_train, "stateful own", "", str(tmp_path), "", True):
        assert outcome.error == "ConfigurationError"
        assert "put what it returned into the state" in outcome.message


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


@pytest.mark.parametrize("kind", ["stateful own", "stateful own middle", "litdata"])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"batch_size": 5}, "batch_size=5, and the checkpoint was written with 8"),
        ({"batch_size": 11}, "batch_size=11, and the checkpoint was written with 8"),  # as many batches as were read
        ({"samples": 15}, "and the checkpoint was written with"),
    ],
)
def test_other_data_in_mid_epoch(
    kind: str, changed: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(loader_module, "rank_zero_info", told.append)
    folder = str(tmp_path / "data")
    write_litdata(Path(folder), RUN.samples)
    loader = fabric_loader(kind, folder)
    states = []
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    states.append(loader.state_dict())
    for _ in batches:
        pass
    states.append(loader.state_dict())
    if "samples" in changed:
        shutil.rmtree(folder)
        write_litdata(Path(folder), changed["samples"])
    again = fabric_loader(kind, folder, **changed)
    with pytest.raises(ConfigurationError, match="leave the loader out of the state") as caught:
        again.load_state_dict(states[0])
    assert text in str(caught.value)
    assert not told
    again.load_state_dict(states[1])
    assert len(told) == 1
    assert told[0].startswith("The next epoch is not read as the last one was: ")
    assert text in told[0]
    assert sum(1 for _ in again) == len(again)


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


@pytest.mark.parametrize("kind", ["litdata", "litdata middle"])
def test_a_checkpoint_of_an_older_release(kind: str, tmp_path: Path) -> None:
    """It knows litdata's data by its path alone, on the stages that read it."""
    write_litdata(tmp_path / "data", RUN.samples)
    loader = fabric_loader(kind, str(tmp_path / "data"))
    next(iter(loader))
    state = {name: value for name, value in loader.state_dict().items() if name not in ("identity", "length")}
    state["is_over"] = False  # as in a loop
    fabric_loader(kind, str(tmp_path / "data")).load_state_dict(state)
    shutil.move(tmp_path / "data", tmp_path / "moved")
    moved = fabric_loader(kind, str(tmp_path / "moved"))
    if "middle" in kind:
        moved.load_state_dict(state)
        return
    with pytest.raises(ConfigurationError, match="knows its data by the place alone"):
        moved.load_state_dict(state)
