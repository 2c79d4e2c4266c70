"""``fabric.launch(function)`` with forked processes returns the result or raises the error, and changes no model."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from lightning_asyncpp.fabric import AsyncPipelineStrategy
from tests.helpers.cases import Case, make_model
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.trainer import arrays
from tests.trainer.launching.test_main_process import outcome_of


def train(fabric: L.Fabric, model: torch.nn.Module, path: Path, fails: bool) -> dict[str, np.ndarray]:
    wrapped = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=0.02))
    for number in range(4):
        fabric.strategy.training_step(Case(2).step(wrapped), Case(2).batch(number))  # type: ignore[attr-defined]
        optimizer.step()
    fabric.save(path, {"model": wrapped})
    if fails and fabric.global_rank == 1:
        raise ValueError("the user's own mistake")
    return arrays(fabric.strategy.full_state_dict())  # type: ignore[attr-defined]


def launched(path: Path, fails: bool) -> None:
    """Launch a training, and check that this process's model is unchanged and can load what was saved."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=AsyncPipelineStrategy(start_method="fork"))
    model = make_model()
    trained = fabric.launch(train, model, path, fails)
    assert_equal_weights(arrays(model.state_dict()), arrays(make_model().state_dict()))
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    assert_equal_weights(arrays(model.state_dict()), trained)


@pytest.mark.parametrize("fails", [False, True])
def test_the_function_returns_or_its_error_does(fails: bool, tmp_path: Path) -> None:
    outcome = outcome_of(launched, tmp_path / "saved.ckpt", fails, timeout=120.0)
    assert ("ValueError: the user's own mistake" in outcome.message) if fails else not outcome.error, outcome.trace
