"""GPTConfig refuses sizes that do not fit together, and gives the right costs of units, by which a pipeline is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig
from lightning_asyncpp.models.moe import Experts

SPARSE = [
    MoEConfig(num_experts=4, top_k=3, expert_dim=20),
    MoEConfig(num_experts=5, top_k=1, num_shared_experts=2, router="sigmoid", num_dense_layers=1, every=2),
]
SMALL: dict[str, Any] = {"vocab_size": 50, "context_length": 12, "num_layers": 4, "dim": 24, "num_heads": 4}


def test_all_problems_at_once() -> None:
    moe = MoEConfig(num_experts=2, top_k=3, balance_bias_rate=0.1, num_dense_layers=2)
    with pytest.raises(ValueError, match="GPTConfig") as caught:
        GPTConfig(num_layers=2, dim=48, num_heads=4, num_kv_heads=3, moe=moe)
    for named in ("num_kv_heads=3", "moe.top_k=3", "moe.balance_bias_rate=0.1", "moe.num_dense_layers=2"):
        assert named in str(caught.value)


def _loop_flops(x_shape: Any, weight_shape: Any, ends_shape: Any, out_shape: Any = None, **_: Any) -> int:
    return int(2 * x_shape[0] * weight_shape[1] * weight_shape[2])


def _loop_backward_flops(grad_shape: Any, x_shape: Any, weight_shape: Any, ends: Any, out_shape: Any = None) -> int:
    return 2 * _loop_flops(x_shape, weight_shape, ends)


@pytest.mark.parametrize("head_dim", [None, 10])
@pytest.mark.parametrize("moe", [None, *SPARSE])
def test_flops_are_those_that_torch_counts(
    moe: MoEConfig | None, head_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experts, "use_grouped", lambda self, device: False)
    config = GPTConfig(**SMALL, num_kv_heads=2, mlp_dim=36, head_dim=head_dim, moe=moe)
    model = GPT(config)
    loop = torch.ops.lightning_asyncpp
    ours = {loop.loop_linear: _loop_flops, loop.loop_linear_backward: _loop_backward_flops}
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=ours) as counter, sdpa_kernel(SDPBackend.MATH), collecting():
        model(tokens).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * config.flops_per_token()


TINY: dict[str, Any] = {"vocab_size": 100, "context_length": 16, "num_layers": 3, "dim": 8, "num_heads": 4}


def test_blocks_that_run_twice_cost_a_third_more() -> None:
    with torch.device("meta"):
        kept, once_more, selective = (
            GPT(GPTConfig(**TINY), how).pipeline_costs()  # type: ignore[arg-type]
            for how in ("none", "block", "selective")
        )
    assert once_more == [kept[0], *[pytest.approx(4 / 3 * cost) for cost in kept[1:-1]], kept[-1]]
    assert selective == kept


def test_a_published_shape() -> None:
    """In SmolLM-360M, the head over 49152 tokens costs as much as 3.4 blocks; with equal layer counts, stages wait."""
    with torch.device("meta"):
        model = GPT(GPTConfig(49152, 2048, 32, 960, num_heads=15, num_kv_heads=5, mlp_dim=2560))
    partition = choose_partition(model, 0, 4, "auto")
    assert partition.counts == (10, 9, 9, 6)
    assert partition.imbalance == pytest.approx(1.02, abs=0.01)
    even = choose_partition(model, 0, 4, "uniform")
    assert (even.counts, even.imbalance) == ((9, 9, 8, 8), pytest.approx(1.18, abs=0.01))
