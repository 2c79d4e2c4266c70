"""Tensors without memory, what is read off them, and what happens if torch no longer has them."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.private_names import PrivateNameError
from lightning_asyncpp.tools.plan import fake_tensors as fake
from lightning_asyncpp.tools.plan.fake_tensors import Meter, NeedsValueError, bytes_of, fake_tensors, without_memory
from lightning_asyncpp.tools.plan.gpu_kernels import kernels_of_gpu


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._subclasses.fake_tensor", "FakeTensorMode"),
        ("torch._subclasses.fake_tensor", "FakeTensor"),
        ("torch._subclasses.fake_tensor", "DataDependentOutputException"),
        ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ],
)
def test_a_private_name_that_is_gone_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[module], name)
    with pytest.raises(PrivateNameError, match=rf"torch .* has no {module}.{name}, .*asyncpp plan"):
        importlib.reload(fake)
    monkeypatch.undo()


def test_a_module_that_is_gone_is_named() -> None:
    with pytest.raises(PrivateNameError, match=r"has no _no_such_module, .*asyncpp plan"):
        fake._module("_no_such_module")


def test_values_are_not_there() -> None:
    with fake_tensors(), pytest.raises(NeedsValueError):
        float(torch.rand(3).sum())


def test_weights_are_replaced_and_come_back_and_shared_ones_stay_shared() -> None:
    model = nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)])
    model[1].weight = model[0].weight
    before = dict(model.state_dict(keep_vars=True))
    with fake_tensors(), without_memory([model]):
        assert model[0].weight is model[1].weight is not before["0.weight"]
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[2].running_mean is not before["2.running_mean"]
        with pytest.raises(NeedsValueError):
            float(model[2].running_mean.sum())
    assert all(tensor is before[name] for name, tensor in model.state_dict(keep_vars=True).items())


def test_what_is_kept_moved_and_multiplied_is_known_by_hand() -> None:
    with fake_tensors(), Meter() as meter:
        x, w = torch.zeros(8, 16), torch.zeros(16, 4, requires_grad=True)
        with meter.reading() as forward:
            y = (x @ w).relu()  # both results are needed: relu keeps its own, the product is let go of
        with meter.reading() as backward:
            y.sum().backward()
        kept = meter.alive
        assert forward.kept == 8 * 4 * 4
        assert forward.peak == 2 * 8 * 4 * 4
        assert forward.flops == 2 * 8 * 16 * 4
        assert forward.moved == 4 * (8 * 16 + 16 * 4 + 8 * 4) + 4 * (8 * 4 + 8 * 4)
        assert backward.flops == 2 * 8 * 16 * 4
        assert w.grad is not None
        del y
        assert kept - meter.alive == 8 * 4 * 4
        with meter.reading() as update:
            w.detach().add_(w.grad)
        assert update.moved == 2 * 16 * 4 * 4
        assert update.kept == 0


def test_shared_memory_counts_once() -> None:
    x = torch.zeros(10, 10)
    assert bytes_of([x, x[:2], x.T, torch.zeros(3)]) == 400 + 12


def test_operations_of_a_gpt_are_what_its_config_says() -> None:
    config = GPTConfig(vocab_size=96, context_length=32, num_layers=2, dim=32, num_heads=4, num_kv_heads=2)
    with torch.device("meta"):
        model = GPT(config)
    with fake_tensors(), Meter() as meter, without_memory([model]):
        with meter.reading() as forward:
            model(torch.zeros(3, 32, dtype=torch.int64))
    assert 3 * forward.flops == config.flops_per_token() * 3 * 32


def test_active_experts_alone_count() -> None:
    """Twice the experts are twice the weights, and as many operations but for the router's."""
    flops = {}
    for experts in (8, 16):
        moe = {"num_experts": experts, "top_k": 2, "expert_dim": 24}
        config = GPTConfig(vocab_size=96, context_length=32, num_layers=2, dim=32, num_heads=4, moe=moe)
        with torch.device("meta"):
            model = GPT(config)
        model.blocks[0].mlp.experts.use_grouped(torch.device("cpu"))
        with fake_tensors(), Meter() as meter, without_memory([model]), torch.no_grad():
            with meter.reading() as forward:
                model(torch.zeros(3, 32, dtype=torch.int64))
        assert 3 * forward.flops == config.flops_per_token() * 3 * 32
        flops[experts] = forward.flops
    assert flops[16] - flops[8] == 2 * 2 * (3 * 32) * 32 * 8


@pytest.mark.parametrize("checkpointing", ["none", "block", "selective"])
def test_a_gpus_norm_keeps_less_than_that_of_a_cpu(checkpointing: str) -> None:
    config = GPTConfig(vocab_size=96, context_length=32, num_layers=2, dim=64, num_heads=4, dropout=0.1)
    kept = {}
    for on_gpu in (False, True):
        with torch.device("meta"):
            model = GPT(config, checkpointing)
        with kernels_of_gpu(on_gpu), fake_tensors(), Meter() as meter, without_memory([model]):
            with meter.reading() as forward:
                y = model(torch.zeros(3, 32, dtype=torch.int64))
            y.sum().backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
            kept[on_gpu] = forward.kept
    assert kept[True] < kept[False] if checkpointing == "none" else kept[True] <= kept[False]
    assert torch.nn.functional.rms_norm(torch.ones(2, 4), (4,)).allclose(torch.ones(2, 4))  # it is back


def test_what_a_block_keeps_on_a_gpu_is_known_by_hand() -> None:
    config = GPTConfig(vocab_size=96, context_length=32, num_layers=1, dim=48, num_heads=6, num_kv_heads=2, mlp_dim=80)
    with torch.device("meta"):
        block = GPT(config).blocks[0]
    with kernels_of_gpu(True), fake_tensors(), Meter() as meter, without_memory([block]):
        x = torch.empty(3, 32, 48, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), meter.reading() as forward:
            y = block(x)
    assert y.dtype == torch.float32
    rows, kv = 3 * 32, 2 * 8
    residuals = 4 * rows * (48 + 48)  # after attention and after the SwiGLU, in fp32; the input was there before
    # In bf16: each linear layer's copy of its input (query, key, value; projection; gate, up), query, key and value
    # turned, what attention mixed; the gate before and behind SiLU, the other factor, and their product.
    halves = 2 * rows * ((3 + 1 + 2) * 48 + (48 + 2 * kv) + 48 + 4 * 80)
    statistics = 4 * rows * 6 + 2 * 4 * rows  # of attention, by head, and of both norms
    weights = 2 * (config.attention_weights() + config.mlp_weights(0, all_experts=True))  # converted
    assert forward.kept == residuals + halves + statistics + weights
