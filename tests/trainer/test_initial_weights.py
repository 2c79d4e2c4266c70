"""Training from saved weights: every stage reads its own tensors, and the run is that of a single process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lightning_asyncpp import GPTModule
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.models.hf import HFTensors
from lightning_asyncpp.trainer.gpt_module import learning_rate_factor
from tests.helpers.hf_cases import exported
from tests.helpers.oracle import assert_equal_weights, joined_parts, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, arrays, fit, initial_weights

SHAPE = {"vocab_size": 32, "context_length": 8, "num_layers": 3, "dim": 16, "num_heads": 2, "mlp_dim": 32}


def started(run: Run, folder: Path, **options: Any) -> GPTModule:
    """A module that starts from a folder of transformers."""
    return GPTModule(
        GPTConfig(**SHAPE, **options), optimizer=run.make_optimizer, warmup_steps=2, total_steps=12,
        initial_weights=str(folder),
    )  # fmt: skip


def described(folder: Path, **options: Any) -> Run:
    return Run(partial(started, folder=folder, **options), dataset="tokens", options={"microbatches": 4})


def weights_read(run: Run) -> tuple[dict[str, np.ndarray], list[str]]:
    """The weights of this rank before the first step, and the tensors that it read."""
    read: list[str] = []
    get = HFTensors.__getitem__

    def recorded(tensors: HFTensors, name: str) -> torch.Tensor:
        read.append(name)
        return get(tensors, name)

    with mock.patch.object(HFTensors, "__getitem__", recorded):
        return initial_weights(run), read


def tensors_of(model: GPT) -> dict[str, np.ndarray]:
    return arrays({f"model.{name}": p for name, p in model.named_parameters()})


@pytest.mark.parametrize("stages", [1, 3])
def test_every_stage_reads_its_own_tensors(pools: Pools, stages: int, tmp_path: Path) -> None:
    model = exported(GPTConfig(**SHAPE), tmp_path / "out", seed=2)
    results = pools.run(stages, weights_read, described(tmp_path / "out"))
    assert_equal_weights(joined_parts([weights for weights, _ in results]), tensors_of(model))
    for weights, read in results:
        assert {f"model.{name}" for name in read} == set(weights)
        assert len(read) == len(set(read))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_training_goes_on_as_in_a_single_process(pools: Pools, tie: bool, tmp_path: Path) -> None:
    exported(GPTConfig(**SHAPE, tie_embeddings=tie), tmp_path / "out", seed=2)
    run = described(tmp_path / "out", tie_embeddings=tie)
    results = pools.run(2, fit, run)

    def schedule(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        return LambdaLR(optimizer, learning_rate_factor(run.module(run))).step  # type: ignore[operator]

    weights, _ = oracle(run, 4, list(mini_batches_of(run)), after_update=schedule)
    if tie:  # its copy is on the last stage, too
        copy = results[0]["weights"].pop("model.head.weight")
        assert np.array_equal(copy, weights["model.embedding.token.weight"])
    assert_equal_weights(joined_weights(results, 2), weights)
