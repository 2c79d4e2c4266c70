"""``fabric.launch(function)`` with processes that are forked or spawned: what comes back, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_asyncpp.fabric import AsyncPipelineStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.trainer import arrays
from tests.trainer.launching.main_process import outcome_of, run


def train(fabric: L.Fabric, model: nn.Module, path: Path, fails: bool) -> tuple[int, dict[str, np.ndarray]]:
    strategy: Any = fabric.strategy
    wrapped = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=0.02))
    for number in range(4):
        x = torch.full((8, DIM), 0.1 * number)
        strategy.training_step(lambda microbatch: wrapped(microbatch).square().mean(), x)
        optimizer.step()
    fabric.save(path, {"model": wrapped})
    if fails and fabric.global_rank == 1:
        raise ValueError("the user's own mistake")
    return fabric.global_rank, arrays(strategy.full_state_dict())


def launched(method: str, path: Path, fails: bool = False) -> bool:
    """Whether the model of this process is as it was; what was saved loads into it."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=AsyncPipelineStrategy(start_method=method))
    model = make_model()
    before = arrays({name: tensor.clone() for name, tensor in model.state_dict().items()})
    rank, trained = fabric.launch(train, model, path, fails)
    assert rank == 0
    unchanged = all(np.array_equal(array, before[name]) for name, array in arrays(model.state_dict()).items())
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    assert all(np.array_equal(array, trained[name]) for name, array in arrays(model.state_dict()).items())
    assert not all(np.array_equal(array, before[name]) for name, array in trained.items())
    return unchanged


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_function_returns_and_the_model_outside_stays(method: str, tmp_path: Path) -> None:
    assert run(launched, method, tmp_path / "saved.ckpt", timeout=120.0)


def test_an_error_of_a_rank_reaches_the_process_that_launched_it(tmp_path: Path) -> None:
    outcome = outcome_of(launched, "fork", tmp_path / "saved.ckpt", True)
    assert "ValueError: the user's own mistake" in outcome.message
