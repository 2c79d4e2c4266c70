"""What the units of a GPT cost, and how a pipeline is cut by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig

SMALL: dict[str, Any] = {"vocab_size": 100, "context_length": 16, "num_layers": 3, "dim": 8, "num_heads": 4}


def cut(num_stages: int, **shape: Any) -> Partition:
    with torch.device("meta"):
        return choose_partition(GPT(GPTConfig(**shape)), 0, num_stages, "auto")


def test_by_hand() -> None:
    config = GPTConfig(**SMALL, num_kv_heads=2, mlp_dim=24)
    # Query and projection 8 x 8, key and value 8 x 4; scores and mixing 2 * 2 * 8 * 16 forward, twice that backward.
    block = 6 * (2 * 64 + 2 * 32 + 3 * 8 * 24) + 3 * 2 * 2 * 8 * 16
    wide = GPTConfig(**SMALL, num_kv_heads=2, head_dim=6, mlp_dim=24)  # 24 x 8 and 12 x 8
    assert wide.block_flops(0) == 6 * (2 * 192 + 2 * 96 + 3 * 8 * 24) + 3 * 2 * 2 * 24 * 16
    assert config.unit_flops() == [8.0, block, block, block, 6 * 8 * 100 + 10 * 100.0]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 200), st.integers(1, 500))
def test_units_add_up_to_the_whole(layers: int, heads: int, context: int, vocabulary: int) -> None:
    config = GPTConfig(vocabulary, context, layers, 4 * heads, num_heads=heads, mlp_dim=40)
    beside = config.dim + 10 * config.vocab_size
    assert sum(config.unit_flops()) - beside == pytest.approx(config.flops_per_token())


def test_experts_cost_what_a_token_meets() -> None:
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=5, num_shared_experts=1, num_dense_layers=1)
    config = GPTConfig(**SMALL, mlp_dim=24, moe=moe)
    assert config.block_flops(0) - config.block_flops(1) == 6 * (3 * 8 * 24 - (8 * 8 + 3 * 3 * 8 * 5))
    beside = config.dim + 10 * config.vocab_size
    assert sum(config.unit_flops()) - beside == pytest.approx(config.flops_per_token())


def test_the_model_has_a_cost_for_each_of_its_layers() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**SMALL))
    assert model.pipeline_costs() == model.config.unit_flops()
    assert len(model.pipeline_costs()) == len(model.pipeline_layers())


def test_blocks_that_run_twice_cost_a_third_more() -> None:
    with torch.device("meta"):
        kept, once_more, selective = (
            GPT(GPTConfig(**SMALL), how).pipeline_costs()  # type: ignore[arg-type]
            for how in ("none", "block", "selective")
        )
    assert once_more == [kept[0], *[pytest.approx(4 / 3 * cost) for cost in kept[1:-1]], kept[-1]]
    assert selective == kept


def test_longer_contexts_make_blocks_dearer_and_the_head_not() -> None:
    short, long = (GPTConfig(**SMALL | {"context_length": context}) for context in (16, 1024))
    assert long.block_flops(0) > 2 * short.block_flops(0)


@pytest.mark.parametrize(("vocabulary", "counts"), [(256, (7, 7)), (8192, (8, 6)), (100_000, (13, 1))])
def test_a_larger_vocabulary_moves_blocks_away_from_the_head(vocabulary: int, counts: tuple[int, ...]) -> None:
    partition = cut(2, vocab_size=vocabulary, context_length=512, num_layers=12, dim=384, num_heads=6)
    assert partition.counts == counts
    assert partition.uniform == (7, 7)


def test_a_published_shape() -> None:
    """SmolLM-360M: the head over 49152 tokens costs as much as 3.4 blocks; the same number of layers would wait."""
    shape: dict[str, Any] = {
        "vocab_size": 49152, "context_length": 2048, "num_layers": 32, "dim": 960, "num_heads": 15, "num_kv_heads": 5,
        "mlp_dim": 2560,
    }  # fmt: skip
    partition = cut(4, **shape)
    assert partition.counts == (10, 9, 9, 6)
    assert partition.imbalance == pytest.approx(1.02, abs=0.01)
    even = partition._replace(counts=partition.uniform)
    assert (even.counts, even.imbalance) == ((9, 9, 8, 8), pytest.approx(1.18, abs=0.01))
