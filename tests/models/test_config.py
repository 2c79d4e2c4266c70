from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig
from lightning_asyncpp.models.moe import Experts

SPARSE = [
    MoEConfig(num_experts=4, top_k=3, expert_dim=20),
    MoEConfig(num_experts=5, top_k=1, num_shared_experts=2, router="sigmoid", num_dense_layers=1, every=2),
]


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
def test_number_of_parameters(tie_embeddings: bool, num_kv_heads: int | None) -> None:
    config = GPTConfig(
        vocab_size=50, num_layers=3, dim=48, num_heads=4, num_kv_heads=num_kv_heads, tie_embeddings=tie_embeddings
    )
    assert config.num_parameters() == sum(parameter.numel() for parameter in GPT(config).parameters())


def test_default_mlp_width_is_a_multiple_of_64_at_least_8_thirds() -> None:
    for dim in (6, 24, 48, 384, 768, 1000 * 6):
        width = GPTConfig(dim=dim, num_heads=3).mlp_width
        assert width % 64 == 0
        assert 0 <= width - 8 * dim / 3 < 64


def test_all_problems_at_once() -> None:
    moe = MoEConfig(num_experts=2, top_k=3, balance_bias_rate=0.1, num_dense_layers=2)
    with pytest.raises(ValueError, match="GPTConfig") as caught:
        GPTConfig(num_layers=2, dim=48, num_heads=4, num_kv_heads=3, moe=moe)
    message = str(caught.value)
    for named in (
        "num_kv_heads=3: must divide num_heads=4",
        "moe.top_k=3: must be from 1 to num_experts=2",
        "moe.balance_bias_rate=0.1: only scores of the sigmoid router take a bias",
        "moe.num_dense_layers=2, every=1: none of num_layers=2 blocks has experts",
    ):
        assert named in message
    assert message.count("\n") == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"vocab_size": 0}, "vocab_size=0: must be at least 1"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"dim": 50, "num_heads": 4}, "num_heads=4: must divide dim=50"),
        ({"dim": 12, "num_heads": 4}, "a head, and 3 is odd"),
        ({"dim": 50, "num_heads": 4, "head_dim": 7}, "head_dim=7: rotary embeddings turn pairs"),
        ({"moe": MoEConfig(num_dense_layers=2, every=5)}, "moe.num_dense_layers=2, every=5: none of num_layers=6"),
        ({"moe": MoEConfig(router="top")}, "moe.router='top': must be 'softmax' or 'sigmoid'"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match="cannot be built") as caught:
        GPTConfig(**arguments)
    assert named in str(caught.value)


@pytest.mark.parametrize("moe", SPARSE)
@pytest.mark.parametrize("attention", [{}, {"qk_norm": True}, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 10}])
def test_number_of_parameters_with_experts(moe: MoEConfig, attention: dict) -> None:
    config = GPTConfig(
        **{"vocab_size": 50, "num_layers": 6, "dim": 48, "num_heads": 4, "mlp_dim": 36, **attention}, moe=moe
    )
    model = GPT(config)
    assert config.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    stacks = [p for name, p in model.named_parameters() if ".experts." in name]
    assert len(stacks) == 3 * config.num_moe_layers > 0
    idle = sum(p[moe.top_k :].numel() for p in stacks)
    assert config.num_active_parameters() == config.num_parameters() - idle


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
    config = GPTConfig(
        vocab_size=50,
        context_length=12,
        num_layers=4,
        dim=24,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=36,
        head_dim=head_dim,
        moe=moe,
    )
    model = GPT(config)
    loop = torch.ops.lightning_asyncpp
    ours = {loop.loop_linear: _loop_flops, loop.loop_linear_backward: _loop_backward_flops}
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=ours) as counter, sdpa_kernel(SDPBackend.MATH), collecting():
        model(tokens).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * config.flops_per_token()


def test_which_blocks_have_experts() -> None:
    def layers(**layout: int) -> list[int]:
        config = GPTConfig(num_layers=6, moe=MoEConfig(**layout))
        found = [layer for layer in range(6) if config.is_moe_layer(layer)]
        assert config.num_moe_layers == len(found)
        return found

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(every=2) == [1, 3, 5]
    assert layers(num_dense_layers=1) == [1, 2, 3, 4, 5]
    assert layers(num_dense_layers=2, every=3) == [4]
    assert [GPTConfig().is_moe_layer(layer) for layer in range(6)] == [False] * 6


def test_a_mapping_gives_the_config_back() -> None:
    config = GPTConfig(qk_norm=True, moe=MoEConfig(num_experts=3, router="sigmoid", balance_bias_rate=0.001))
    again = GPTConfig(**asdict(config))
    assert again == config
    assert isinstance(again.moe, MoEConfig)
