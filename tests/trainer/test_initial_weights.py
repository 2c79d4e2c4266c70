"""Training can start from saved weights, of which every stage reads only its own tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from lightning_asyncpp import GPTModule
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.models.hf import HFTensors
from tests.helpers.models import exported
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, arrays, initial_weights

CONFIG = GPTConfig(32, 8, num_layers=3, dim=16, num_heads=2, mlp_dim=32)


def started(run: Run, folder: Path) -> GPTModule:
    """Return a module whose initial weights are in a folder in the format of transformers."""
    return GPTModule(CONFIG, optimizer=run.make_optimizer, decay="constant", initial_weights=str(folder))


def weights_read(run: Run) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return this rank's weights before the first step, and the names of the tensors that it read."""
    read: list[str] = []
    get = HFTensors.__getitem__

    def recorded(tensors: HFTensors, name: str) -> torch.Tensor:
        read.append(name)
        return get(tensors, name)

    with mock.patch.object(HFTensors, "__getitem__", recorded):
        return initial_weights(run), read


def test_every_stage_reads_its_own_tensors(pools: Pools, tmp_path: Path) -> None:
    model = exported(CONFIG, tmp_path, seed=2)
    run = Run(partial(started, folder=tmp_path), dataset="tokens", options={"microbatches": 4})
    results = pools.run(3, weights_read, run)
    expected = arrays({f"model.{name}": p for name, p in model.named_parameters()})
    assert_equal_weights(joined_parts([weights for weights, _ in results]), expected)
    for weights, read in results:
        assert {f"model.{name}" for name in read} == set(weights)
        assert len(read) == len(set(read))
