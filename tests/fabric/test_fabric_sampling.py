"""Sampling from a pipeline in a Fabric loop, of a model that starts from saved weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.fabric import AsyncPipelineStrategy
from lightning_asyncpp.models import GPT, GPTConfig, start_from
from lightning_asyncpp.models.sampling import Sampling, generate_tokens, logits_of
from tests.helpers.fabric import make_fabric
from tests.helpers.hf_cases import exported
from tests.helpers.pool import Pools

CONFIG = GPTConfig(vocab_size=64, context_length=10, num_layers=3, dim=16, num_heads=2, mlp_dim=32, init_std=0.3)
PROMPT = [5, 6, 7]


def tokens_of_stages(folder: str, sampling: Sampling) -> list[int]:
    strategy = AsyncPipelineStrategy(microbatches=3)
    fabric = make_fabric(strategy)
    with fabric.init_module(empty_init=True):
        model = GPT(CONFIG)
    start_from(model, folder)
    model = fabric.setup_module(model).eval()

    def next_logits(tokens: Tensor) -> Tensor | None:
        logits: Tensor | None = strategy.evaluation_step(lambda batch: model(batch)[:, -1], tokens)
        return logits

    agree = strategy.broadcast
    return list(generate_tokens(next_logits, PROMPT, CONFIG.context_length, 15, sampling, agree=agree))


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_stages_write_what_one_process_writes(pools: Pools, stages: int, tmp_path: Path) -> None:
    model = exported(CONFIG, tmp_path / "out", seed=3)
    sampling = Sampling(0.8, top_k=30, seed=1)
    with torch.no_grad():
        expected = list(generate_tokens(logits_of(model), PROMPT, CONFIG.context_length, 15, sampling))
    results = pools.run(stages, tokens_of_stages, str(tmp_path / "out"), sampling)
    assert results == [expected] * stages
    assert len(set(expected)) > 5
