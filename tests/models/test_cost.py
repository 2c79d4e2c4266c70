"""What the units of a GPT cost, and how a pipeline is cut by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig

SMALL: dict[str, Any] = {"vocab_size": 100, "context_length": 16, "num_layers": 3, "dim": 8, "num_heads": 4}


def test_by_hand() -> None:
    config = GPTConfig(**SMALL, num_kv_heads=2, mlp_dim=24)
    # Query and projection 8 x 8, key and value 8 x 4; scores and mixing 2 * 2 * 8 * 16 forward, twice that backward.
    block = 6 * (2 * 64 + 2 * 32 + 3 * 8 * 24) + 3 * 2 * 2 * 8 * 16
    wide = GPTConfig(**SMALL, num_kv_heads=2, head_dim=6, mlp_dim=24)  # 24 x 8 and 12 x 8
    assert wide.block_flops(0) == 6 * (2 * 192 + 2 * 96 + 3 * 8 * 24) + 3 * 2 * 2 * 24 * 16
    assert config.unit_flops() == [8.0, block, block, block, 6 * 8 * 100 + 10 * 100.0]


def test_experts_cost_what_a_token_meets() -> None:
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=5, num_shared_experts=1, num_dense_layers=1)
    config = GPTConfig(**SMALL, mlp_dim=24, moe=moe)
    assert config.block_flops(0) - config.block_flops(1) == 6 * (3 * 8 * 24 - (8 * 8 + 3 * 3 * 8 * 5))
    beside = config.dim + 10 * config.vocab_size
    assert sum(config.unit_flops()) - beside == pytest.approx(config.flops_per_token())


def test_blocks_that_run_twice_cost_a_third_more() -> None:
    with torch.device("meta"):
        kept, once_more, selective = (
            GPT(GPTConfig(**SMALL), how).pipeline_costs()  # type: ignore[arg-type]
            for how in ("none", "block", "selective")
        )
    assert once_more == [kept[0], *[pytest.approx(4 / 3 * cost) for cost in kept[1:-1]], kept[-1]]
    assert selective == kept


def test_a_published_shape() -> None:
    """SmolLM-360M: the head over 49152 tokens costs as much as 3.4 blocks; the same number of layers would wait."""
    with torch.device("meta"):
        model = GPT(GPTConfig(49152, 2048, 32, 960, num_heads=15, num_kv_heads=5, mlp_dim=2560))
    partition = choose_partition(model, 0, 4, "auto")
    assert partition.counts == (10, 9, 9, 6)
    assert partition.imbalance == pytest.approx(1.02, abs=0.01)
    even = partition._replace(counts=partition.uniform)
    assert (even.counts, even.imbalance) == ((9, 9, 8, 8), pytest.approx(1.18, abs=0.01))
