"""A resumed Fabric loop continues to read its data at the position of the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric import AsyncPipelineStrategy
from lightning_asyncpp.fabric.checkpoint import FabricLoader
from lightning_asyncpp.strategy_parts.stage_loader import stage_loader
from tests.helpers.cases import make_model
from tests.helpers.fabric import make_fabric
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import training_loader, write_litdata
from tests.helpers.trainer import Net, Run, arrays

EPOCHS = 3
RUN = Run(Net, samples=21)


def fabric_loader(kind: str, folder: str = "") -> FabricLoader:
    torch.manual_seed(3)
    loader = training_loader(RUN, kind, folder)
    return FabricLoader(stage_loader(loader, 1, 0, needs_data=True))


def numbers_of(batches: Any) -> list[Any]:
    return [batch["number"].tolist() for batch in batches]


def read_and_train(folder: Path, at: str = "") -> dict[str, Any]:
    """Train and save ``{batches}`` after every batch and ``epoch-{epoch}`` after every epoch, or resume from ``at``."""
    strategy = AsyncPipelineStrategy(microbatches=3)
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    batches = fabric.setup_dataloaders(training_loader(RUN, "litdata", str(folder / "data")))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": batches, "epoch": 0, "batches": 0}
    if at:
        fabric.load(folder / at, state)
    numbers, losses = [], []
    for epoch in range(state["epoch"], EPOCHS):
        for batch in batches:
            loss = strategy.training_step(lambda piece: F.mse_loss(model(piece["x"]), piece["y"]), batch)
            optimizer.step()
            numbers.append(batch["number"].tolist() if isinstance(batch, dict) else [])
            losses.append(None if loss is None else loss.item())
            state["batches"] += 1
            if not at:
                fabric.save(folder / str(state["batches"]), state)
        state["epoch"] = epoch + 1
        if not at:
            fabric.save(folder / f"epoch-{epoch + 1}", state)
    strategy.drain()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"numbers": numbers, "losses": losses, "weights": arrays(weights)}


def test_resumed_in_mid_epoch_and_between_epochs(pools: Pools, tmp_path: Path) -> None:
    """All stages, even the middle one, get equally many batches; data, losses and weights equal the whole run's."""
    write_litdata(tmp_path / "data", RUN.samples)
    whole = pools.run(3, read_and_train, tmp_path)
    read = [number for batch in whole[0]["numbers"] for number in batch]
    epochs = [read[e * RUN.samples : (e + 1) * RUN.samples] for e in range(EPOCHS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(RUN.samples))] * EPOCHS
    assert len(set(map(tuple, epochs))) == EPOCHS, "each is shuffled anew"
    for name, done in (("5", 5), ("epoch-2", 6)):
        for found, expected in zip(pools.run(3, read_and_train, tmp_path, name), whole):
            assert found["numbers"] == expected["numbers"][done:]
            assert found["losses"] == expected["losses"][done:]
            assert_equal_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("taken", [pytest.param(2, id="in mid-epoch"), pytest.param(3, id="at its last batch")])
def test_saved_again_before_a_batch_was_read(taken: int) -> None:
    loader = fabric_loader("stateful")
    batches = iter(loader)
    read = [next(batches)["number"].tolist() for _ in range(taken)]
    saved = [loader.state_dict()]
    read += numbers_of(batches)
    saved.append(loader.state_dict())
    following = numbers_of(loader)
    for state, rest in zip(saved, (read[taken:], following)):
        again, once_more = fabric_loader("stateful"), fabric_loader("stateful")
        again.load_state_dict(state)
        once_more.load_state_dict(again.state_dict())
        assert numbers_of(once_more) == rest
        if state is saved[0]:
            assert numbers_of(once_more) == following


def test_the_place_of_a_loader_of_plain_fabric_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leave the loader out of the state"):
        fabric_loader("stateful").load_state_dict(fabric_loader("stateful").loader.state_dict())


def test_moved_data(tmp_path: Path) -> None:
    write_litdata(tmp_path / "data", RUN.samples)
    loader = fabric_loader("litdata", str(tmp_path / "data"))
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), numbers_of(batches)
    shutil.move(tmp_path / "data", tmp_path / "moved")
    again = fabric_loader("litdata", str(tmp_path / "moved"))
    again.load_state_dict(state)
    assert numbers_of(again) == rest
