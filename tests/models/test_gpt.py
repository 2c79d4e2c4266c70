from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig
from lightning_asyncpp.models.layers import RotaryEmbedding

TINY = GPTConfig(vocab_size=31, context_length=16, num_layers=2, dim=24, num_heads=4, num_kv_heads=2, mlp_dim=40)

EXPERTS = MoEConfig(num_experts=3, top_k=2, expert_dim=8, num_shared_experts=1, router="sigmoid", num_dense_layers=1)
SPARSE = GPTConfig(
    vocab_size=31, context_length=16, num_layers=2, dim=24, num_heads=4, mlp_dim=40, qk_norm=True, moe=EXPERTS
)


def tokens_of(config: GPTConfig, batch: int = 3, time: int = 11) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(5))


def built_on_meta(config: GPTConfig, order: list[int] | None = None) -> GPT:
    with torch.device("meta"):
        model = GPT(config)
    units = model.pipeline_layers()
    for index in order or range(len(units)):
        torch.manual_seed(100 + index)
        units[index].to_empty(device="cpu")
        # to_empty leaves undefined values. NaN reveals a reset that forgets a tensor.
        for tensor in [*units[index].parameters(), *units[index].buffers()]:
            tensor.data.fill_(float("nan"))
        units[index].reset_parameters()
    return model


@pytest.mark.parametrize("config", [TINY, SPARSE])
def test_initial_weights_of_a_unit_do_not_depend_on_the_others(config: GPTConfig) -> None:
    one_by_one, backwards = built_on_meta(config), built_on_meta(config, [3, 2, 1, 0])
    whole = GPT(config).eval()
    for index, unit in enumerate(whole.pipeline_layers()):
        torch.manual_seed(100 + index)
        unit.reset_parameters()
    for model in (one_by_one, backwards):
        for (name, value), expected in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
            assert torch.equal(value, expected), name
        assert torch.equal(model.eval()(tokens_of(TINY)), whole(tokens_of(TINY)))


def test_scale_of_the_initial_weights() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, num_layers=8, dim=192, num_heads=4, init_std=0.05))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = name.endswith(("projection.weight", "down.weight"))
        assert parameter.detach().std().item() == pytest.approx(0.05 / 4 if residual else 0.05, rel=0.05), name


def test_tied_matrix_is_one_parameter_also_after_meta() -> None:
    config = GPTConfig(vocab_size=31, context_length=16, num_layers=2, dim=24, num_heads=4, tie_embeddings=True)
    for model in (GPT(config), built_on_meta(config), copy.deepcopy(GPT(config))):
        assert model.head.weight is model.embedding.token.weight
        assert model.head.weight.detach().std().item() == pytest.approx(config.init_std, rel=0.2)
        model(tokens_of(config)).sum().backward()
        assert model.head.weight.grad is not None
    assert [name for name, _ in model.head.named_children()] == ["norm"]


def test_rotary_tables_stay_exact_in_bf16() -> None:
    exact = RotaryEmbedding(8, 4096, 10_000.0)
    with torch.device("meta"):
        meta = RotaryEmbedding(8, 4096, 10_000.0).to(torch.bfloat16)
    meta.to_empty(device="cpu").reset_parameters()
    for converted in (nn.Sequential(RotaryEmbedding(8, 4096, 10_000.0)).bfloat16()[0], meta):
        assert converted.cos.dtype == torch.float32
        assert torch.equal(converted.cos, exact.cos)
        assert torch.equal(converted.sin, exact.sin)


@pytest.mark.parametrize("config", [TINY, SPARSE])
def test_bf16_weights_and_autocast_are_near_fp32(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model, tokens = GPT(config).eval(), tokens_of(TINY)
    expected = model(tokens).detach()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(tokens)
    converted = copy.deepcopy(model).bfloat16()(tokens)
    for logits in (mixed, converted):
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits.float(), expected, atol=0.01 * float(expected.abs().max()) + 5e-3, rtol=0.05)


def test_sequence_longer_than_the_context() -> None:
    model, tokens = GPT(TINY), torch.zeros(1, 17, dtype=torch.int64)
    for called in (model, nn.Sequential(*model.pipeline_layers()), model.pipeline_layers()[0]):
        with pytest.raises(ValueError, match="sequences of 17 tokens do not fit context_length=16"):
            called(tokens)
        assert len(called(tokens[:, :16])[0]) == 16
