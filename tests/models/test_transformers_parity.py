"""Logits and all gradients equal those of the classes of transformers that a trained model is exported to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig

SHAPE = {"vocab_size": 37, "context_length": 24, "num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 2}
NUMBERS = {"mlp_dim": 48, "rope_base": 500.0, "norm_eps": 1e-6, "init_std": 0.2}

MIXTRAL = MoEConfig(num_experts=6, top_k=2, expert_dim=40, balance_loss=0.0)
GLM = MoEConfig(
    num_experts=6, top_k=3, expert_dim=20, num_shared_experts=2, router="sigmoid", routed_scaling=1.5,
    balance_loss=0.0, num_dense_layers=1,
)  # fmt: skip


def built(**options: Any) -> GPT:
    """Norms away from 1, and biases large enough to choose other experts."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | NUMBERS | options))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                tensor.uniform_(-0.3, 0.3)
    return model


def theirs(model: GPT, name: str, **options: Any) -> nn.Module:
    """The class ``name`` of transformers with the weights of ``model``."""
    transformers = pytest.importorskip("transformers")
    config = model.config
    shape = transformers.AutoConfig.for_model(
        getattr(transformers, name).config_class.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        **{"intermediate_size": config.mlp_width, **options},
    )
    shape.rope_parameters = {
        "rope_type": "default", "rope_theta": config.rope_base, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    twin = getattr(transformers, name)._from_config(shape, attn_implementation="eager")
    if config.moe is not None:
        twin.set_experts_implementation("eager")
    missing, unexpected = twin.load_state_dict(translated(model.state_dict()), strict=False)
    assert (missing, unexpected) == ([], [])
    return twin


RENAMED = {
    "embedding.token": "model.embed_tokens", "head.norm": "model.norm", "head.weight": "lm_head.weight",
    "blocks.": "model.layers.", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    ".attention.": ".self_attn.", "query_norm": "q_norm", "key_norm": "k_norm",
    "query.": "q_proj.", "key.": "k_proj.", "value.": "v_proj.", "projection.": "o_proj.",
    "mlp.router.balance_bias": "mlp.gate.e_score_correction_bias", "mlp.router.": "mlp.gate.",
    "mlp.shared.gate.": "mlp.shared_experts.gate_proj.", "mlp.shared.up.": "mlp.shared_experts.up_proj.",
    "mlp.shared.down.": "mlp.shared_experts.down_proj.", "mlp.experts.down": "mlp.experts.down_proj",
    "mlp.gate.weight": "mlp.gate_proj.weight", "mlp.up.": "mlp.up_proj.", "mlp.down.": "mlp.down_proj.",
}  # fmt: skip


def translated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by their names; an expert's gate and up are one matrix there."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate"):
            joined = torch.cat((tensor, tensors[name.replace("gate", "up")]), dim=1)
            result[name.replace("blocks.", "model.layers.").replace("gate", "gate_up_proj")] = joined
        elif not name.endswith("experts.up"):
            new = name
            dense_gate = new.endswith("mlp.gate.weight")
            for ours, renamed in RENAMED.items():
                if ours != "mlp.gate.weight" or dense_gate:
                    new = new.replace(ours, renamed)
            result[new] = tensor
    return result


def compare(model: GPT, twin: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.config.vocab_size, (3, 24), generator=generator)
    with collecting():
        logits = model(tokens)
    expected = twin(input_ids=tokens).logits
    assert float(expected.detach().std()) > 0.3
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    ours = translated({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert set(ours) == set(gradients)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        scale = float(gradient.abs().max())
        assert scale > 1e-6, name
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_dense_is_llama() -> None:
    model = built()
    compare(model, theirs(model, "LlamaForCausalLM"))


def test_dense_with_normalised_queries_and_keys_is_qwen3() -> None:
    for head_dim in (None, 12):
        model = built(qk_norm=True, head_dim=head_dim)
        compare(model, theirs(model, "Qwen3ForCausalLM"))


def mixtral(model: GPT, **options: Any) -> nn.Module:
    moe = model.config.moe
    assert moe is not None
    return theirs(
        model, "MixtralForCausalLM", intermediate_size=model.config.expert_width, num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k, sliding_window=None, **options,
    )  # fmt: skip


def test_softmax_experts_are_mixtral() -> None:
    model = built(moe=MIXTRAL)
    compare(model, mixtral(model))


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True}, {"normalize_top_k": False}, {"num_heads": 6, "head_dim": 12}],
    ids=["norms", "scores as they are", "heads wider than the model"],
)
def test_sigmoid_experts_are_glm(options: dict[str, Any]) -> None:
    moe = MoEConfig(**{**vars(GLM), "normalize_top_k": options.pop("normalize_top_k", True)})
    model = built(moe=moe, **options)
    compare(model, glm(model))


def glm(model: GPT) -> Any:
    moe = model.config.moe
    assert moe is not None
    return theirs(
        model, "Glm4MoeForCausalLM", moe_intermediate_size=model.config.expert_width, n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k, n_shared_experts=moe.num_shared_experts, n_group=1, topk_group=1,
        first_k_dense_replace=moe.num_dense_layers, norm_topk_prob=moe.normalize_top_k,
        routed_scaling_factor=moe.routed_scaling, use_qk_norm=model.config.qk_norm,
    )  # fmt: skip
