"""The mixture-of-experts layer equals a loop over tokens, and has the right losses and counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig
from lightning_asyncpp.models.moe import MoE, Router

SETTINGS = [
    MoEConfig(num_experts=5, top_k=2, expert_dim=24),
    MoEConfig(num_experts=5, top_k=1, expert_dim=24, normalize_top_k=False, num_shared_experts=1),
    MoEConfig(num_experts=6, top_k=3, expert_dim=8, router="sigmoid", num_shared_experts=2, routed_scaling=2.5),
    MoEConfig(num_experts=4, top_k=4, expert_dim=8, router="sigmoid", normalize_top_k=False),
    MoEConfig(num_experts=1, top_k=1, expert_dim=8),
]


def shape(moe: MoEConfig, **options: Any) -> GPTConfig:
    sizes = {"vocab_size": 31, "context_length": 16, "num_layers": 2, "dim": 16, "num_heads": 2, "mlp_dim": 24}
    return GPTConfig(**{**sizes, **options}, moe=moe)


def layer(moe: MoEConfig, std: float = 0.4) -> MoE:
    torch.manual_seed(0)
    made = MoE(shape(moe))
    made.initialize(std, std)
    if made.router.balance_bias is not None:
        made.router.balance_bias.uniform_(-0.3, 0.3)
    return made


def inputs(batch: int = 3, time: int = 7, dim: int = 16) -> Tensor:
    return torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(1))


def written_out(made: MoE, moe: MoEConfig, x: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Compute the layer token by token in fp64; return the output and the experts of each token."""
    w = {name: p.double() for name, p in [*made.named_parameters(), *made.named_buffers()]}
    outputs, chosen = [], []
    for token in x.double().flatten(0, -2):
        logits = w["router.weight"] @ token
        scores = logits.softmax(0) if moe.router == "softmax" else logits.sigmoid()
        order = scores + w.get("router.balance_bias", torch.zeros(()))
        experts = order.detach().sort(descending=True).indices[: moe.top_k].tolist()
        total = sum(scores[e] for e in experts) if moe.normalize_top_k else 1.0
        output = torch.zeros_like(token)
        for e in experts:
            inner = F.silu(w["experts.gate"][e] @ token) * (w["experts.up"][e] @ token)
            output = output + moe.routed_scaling * scores[e] / total * (w["experts.down"][e] @ inner)
        if moe.num_shared_experts:
            inner = F.silu(w["shared.gate.weight"] @ token) * (w["shared.up.weight"] @ token)
            output = output + w["shared.down.weight"] @ inner
        outputs.append(output)
        chosen.append(experts)
    return torch.stack(outputs).view(x.shape), chosen


@pytest.mark.parametrize("moe", SETTINGS)
@pytest.mark.parametrize("grouped", [True, False])
def test_against_the_layer_written_out(moe: MoEConfig, grouped: bool) -> None:
    made, x = layer(moe), inputs().requires_grad_()
    output = made(x, grouped and made.experts.use_grouped(x.device))
    expected, chosen = written_out(made, moe, x)
    torch.testing.assert_close(output.output.double(), expected, rtol=1e-5, atol=1e-5)
    counts = torch.bincount(torch.tensor(chosen).flatten(), minlength=moe.num_experts)
    assert output.counts[: moe.num_experts].tolist() == counts.tolist()
    leaves = [x, *made.parameters()]
    toward = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(output.output, leaves, toward, allow_unused=True)
    for a, b in zip(found, torch.autograd.grad(expected, leaves, toward.double(), allow_unused=True), strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("moe", SETTINGS[:3])
@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_routing_is_computed_in_fp32(moe: MoEConfig, kind: str) -> None:
    router, x = layer(moe).router, inputs().flatten(0, 1).bfloat16()
    router.weight.data = router.weight.data.bfloat16().float()
    expected = copy.deepcopy(router)(x.float())
    router = router.bfloat16() if kind == "bf16" else router
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        routing = router(x)
    for a, b in zip(routing, expected):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_the_bias_stays_in_fp32_and_is_no_parameter() -> None:
    made = layer(SETTINGS[2])
    bias = made.router.balance_bias.clone()
    assert not torch.equal(bias, bias.bfloat16().float())
    for converted in (copy.deepcopy(made).bfloat16(), copy.deepcopy(made).to(torch.float64)):
        assert converted.router.balance_bias.dtype == torch.float32
        assert torch.equal(converted.state_dict()["router.balance_bias"], bias)
        assert converted.router.weight.dtype != torch.float32
    assert "router.balance_bias" not in dict(made.named_parameters())
    assert "router.balance_bias" not in layer(SETTINGS[0]).state_dict()
    with torch.device("meta"):
        empty = MoE(shape(SETTINGS[2])).bfloat16()
    empty.to_empty(device="cpu")
    empty.initialize(0.1, 0.1)
    assert empty.router.balance_bias.dtype == torch.float32
    assert torch.equal(empty.router.balance_bias, torch.zeros(6))


@pytest.mark.parametrize("moe", SETTINGS)
def test_the_loss_by_its_formula(moe: MoEConfig) -> None:
    made, x = layer(moe), inputs()
    tokens = x.flatten(0, 1).double()
    logits = tokens @ made.router.weight.double().T
    scores = logits.softmax(1) if moe.router == "softmax" else logits.sigmoid()
    _, chosen = written_out(made, moe, x)
    shares = torch.bincount(torch.tensor(chosen).flatten(), minlength=moe.num_experts) / torch.tensor(chosen).numel()
    balance = moe.num_experts * (shares * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    for made.balance_coefficient in (0.0, 0.3):
        loss = made(x, False).loss
        expected = made.balance_coefficient * balance
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
        if made.balance_coefficient:
            (gradient,) = torch.autograd.grad(loss, made.router.weight)
            (wanted,) = torch.autograd.grad(expected, made.router.weight, retain_graph=True)
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
        else:
            assert not loss.requires_grad


def test_coefficients_mean_the_same_at_any_depth() -> None:
    def loss(num_layers: int, **layout: int) -> float:
        moe = MoEConfig(num_experts=4, expert_dim=8, balance_loss=1.0, **layout)
        torch.manual_seed(0)
        model = GPT(shape(moe, num_layers=num_layers, init_std=0.02))
        with collecting() as said:
            model(torch.arange(32).view(2, 16) % 31)
        assert len(said.losses) == model.config.num_moe_layers
        return said.total_loss().item()

    assert loss(1) == pytest.approx(1, rel=0.02)
    assert loss(6) == pytest.approx(loss(1), rel=0.02)
    assert loss(6, num_dense_layers=2, every=2) == pytest.approx(loss(1), rel=0.02)


def test_metrics() -> None:
    made, x = layer(SETTINGS[0]), inputs()
    router, counts = made.router, made(x, False).counts
    assert counts.shape == (router.num_statistics,)
    loads, probabilities = counts[:5], router(x.flatten(0, 1)).probabilities.double()
    expected = {
        "moe_load_max": float(loads.max() / loads.mean()),
        "moe_load_min": float(loads.min() / loads.mean()),
        "moe_entropy": -(probabilities * probabilities.log()).sum(1).mean().item(),
    }
    assert router.compute_metrics(counts) == pytest.approx(expected)
    assert set(router.metrics) == expected.keys()
    assert router.compute_metrics(torch.zeros_like(counts)) == dict.fromkeys(router.metrics, 0.0)


def test_the_bias_moves_by_its_rate_towards_the_mean_load() -> None:
    moe = MoEConfig(num_experts=4, top_k=1, expert_dim=8, router="sigmoid", balance_bias_rate=0.01)
    router = Router(shape(moe))
    router.initialize(0.1)
    totals = torch.tensor([10.0, 0.0, 4.0, 2.0, 16.0, 1.0], dtype=torch.float64)  # mean load 4
    router.update_from_statistics(totals)
    torch.testing.assert_close(router.balance_bias, torch.tensor([-0.01, 0.01, 0.0, 0.01]))
    router.update_from_statistics(totals)
    torch.testing.assert_close(router.balance_bias, torch.tensor([-0.02, 0.02, 0.0, 0.02]))
    fixed = Router(shape(MoEConfig(num_experts=4, expert_dim=8, router="sigmoid")))
    fixed.initialize(0.1)
    fixed.update_from_statistics(totals)
    assert torch.equal(fixed.balance_bias, torch.zeros(4))
    assert fixed.versioned_buffers == ("balance_bias",)


def test_only_training_has_losses_and_counts() -> None:
    model, tokens = GPT(shape(SETTINGS[0])), torch.arange(32).view(2, 16) % 31
    with collecting() as said:
        model(tokens)
    assert [list(counts.shape) for counts in said.statistics.values()] == [[7], [7]]
    assert list(said.statistics) == [block.mlp.router for block in model.blocks]
    model.eval()
    with collecting() as said:
        model(tokens).sum().backward()
    assert said.losses == []
    assert said.statistics == {}
