"""Models of every class that an export can be, with weights that make their logits differ from those of others."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig, SavedGPT
from lightning_asyncpp.models.hf import write_hf

SHAPE = {
    "vocab_size": 96, "context_length": 48, "num_layers": 3, "dim": 32, "num_heads": 4, "mlp_dim": 56,
    "init_std": 0.3, "norm_eps": 2e-5, "rope_base": 5_000.0,
}  # fmt: skip
SOFTMAX = {"num_experts": 5, "top_k": 2, "expert_dim": 24}
GLM = SOFTMAX | {"num_shared_experts": 2, "router": "sigmoid", "routed_scaling": 1.5, "num_dense_layers": 1}

CASES: dict[str, tuple[str, GPTConfig]] = {
    "llama": ("LlamaForCausalLM", GPTConfig(**SHAPE)),
    "llama-tied": ("LlamaForCausalLM", GPTConfig(**SHAPE, tie_embeddings=True, dropout=0.1)),
    "llama-grouped": ("LlamaForCausalLM", GPTConfig(**SHAPE, num_kv_heads=2)),
    "qwen3": ("Qwen3ForCausalLM", GPTConfig(**SHAPE, num_kv_heads=1, qk_norm=True)),
    "mixtral": ("MixtralForCausalLM", GPTConfig(**SHAPE, num_kv_heads=2, moe=MoEConfig(**SOFTMAX))),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        GPTConfig(**SHAPE, qk_norm=True, moe=MoEConfig(**SOFTMAX, every=2, normalize_top_k=False)),
    ),
    "glm4-moe": ("Glm4MoeForCausalLM", GPTConfig(**SHAPE, num_kv_heads=2, moe=MoEConfig(**GLM))),
    "qwen3-wide": ("Qwen3ForCausalLM", GPTConfig(**SHAPE, head_dim=12, qk_norm=True, tie_embeddings=True)),
    "glm4-moe-wide": (
        "Glm4MoeForCausalLM",
        GPTConfig(
            **SHAPE | {"num_heads": 6},
            num_kv_heads=2,
            head_dim=12,
            moe=MoEConfig(**GLM),
        ),
    ),
    "glm4-moe-qk": (
        "Glm4MoeForCausalLM",
        GPTConfig(**SHAPE, qk_norm=True, tie_embeddings=True, moe=MoEConfig(**{**GLM, "num_dense_layers": 0})),
    ),
}


def make_model(config: GPTConfig, seed: int = 0) -> GPT:
    """Norms away from 1 and biases away from 0, as after a training."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("balance_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model.eval()


def saved(model: GPT) -> SavedGPT:
    state = model.state_dict()
    return SavedGPT("the model", model.config, state, {name: tuple(tensor.shape) for name, tensor in state.items()})


def exported(config: GPTConfig, folder: Path, seed: int = 0) -> GPT:
    model = make_model(config, seed)
    write_hf(saved(model), folder)
    return model


def tokens_of(config: GPTConfig, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, config.vocab_size, (batch, config.context_length), generator=generator)
