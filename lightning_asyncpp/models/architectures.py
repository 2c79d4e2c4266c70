"""Names of a GPT's tensors and config values in classes of `transformers`: one table per class, for both directions.

Nothing here imports `transformers`. The names are those of the files on the Hugging Face hub, which other programs read
too; `transformers` renames some of them when it loads a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.saved import WeightsError

LAYER = "{layer}"
EXPERT = "{expert}"  # the files hold one tensor per expert; a GPT holds one tensor for all experts
_BLOCK = re.compile(r"^blocks\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Architecture:
    """A class of `transformers`, and the GPTs that it can represent."""

    class_name: str
    """Value of ``architectures`` in config.json."""
    model_type: str
    """Value of ``model_type`` in config.json."""
    tensors: Mapping[str, str]
    """Names in the GPT, mapped to names in the files."""
    values: Mapping[str, str]
    """Fields of the GPT's config, mapped to keys in config.json."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the GPT's config, mapped to the only value that the class supports."""
    least: Mapping[str, int] = field(default_factory=dict)
    """Fields of the GPT's config, mapped to the smallest value that the class supports."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys in config.json, mapped to the only value that a GPT supports."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys in config.json, mapped to the class's default."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys in config.json, which some releases write, mapped to the keys."""
    unused: frozenset[str] = frozenset()
    """Fields of the GPT's config that do not affect a model of this class."""
    always_fp32: tuple[str, ...] = ()
    """Suffixes of the names of the GPT's tensors that the class always keeps in fp32."""


_COMMON = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "blocks.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "blocks.{layer}.attention.query.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "blocks.{layer}.attention.key.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "blocks.{layer}.attention.value.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "blocks.{layer}.attention.projection.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "blocks.{layer}.mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_SWIGLU = {
    "blocks.{layer}.mlp.gate.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "blocks.{layer}.mlp.up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "blocks.{layer}.mlp.down.weight": "model.layers.{layer}.mlp.down_proj.weight",
}
_QK_NORM = {
    "blocks.{layer}.attention.query_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.{layer}.attention.key_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
_EXPERTS = {
    "blocks.{layer}.mlp.router.weight": "model.layers.{layer}.mlp.gate.weight",
    "blocks.{layer}.mlp.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "blocks.{layer}.mlp.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "blocks.{layer}.mlp.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}
_MIXTRALS_EXPERTS = {
    "blocks.{layer}.mlp.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "blocks.{layer}.mlp.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "blocks.{layer}.mlp.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "blocks.{layer}.mlp.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}
_BALANCE_BIAS = "blocks.{layer}.mlp.router.balance_bias"
_GLMS_OWN = {
    _BALANCE_BIAS: "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "blocks.{layer}.mlp.shared.gate.weight": "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
    "blocks.{layer}.mlp.shared.up.weight": "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
    "blocks.{layer}.mlp.shared.down.weight": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
}
_VALUES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_CONSTANTS = {"hidden_act": "silu", "rope_type": "default", "partial_rotary_factor": 1.0}
_DEFAULTS = _CONSTANTS | {
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
}

_NO_SLIDING = {"use_sliding_window": False, "attention_bias": False}

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    tensors=_COMMON | _SWIGLU,
    values=_VALUES,
    required={"qk_norm": False},
    constants=_CONSTANTS | {"attention_bias": False, "mlp_bias": False},
    defaults=_DEFAULTS | {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    tensors=_COMMON | _SWIGLU | _QK_NORM,
    values=_VALUES,
    required={"qk_norm": True},
    constants=_CONSTANTS | _NO_SLIDING,
    defaults=_DEFAULTS | {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
)
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    tensors=_COMMON | _MIXTRALS_EXPERTS,
    values={name: key for name, key in _VALUES.items() if name != "mlp_dim"}
    | {
        "moe.expert_dim": "intermediate_size",
        "moe.num_experts": "num_local_experts",
        "moe.top_k": "num_experts_per_tok",
    },
    required={
        "qk_norm": False,
        "moe.router": "softmax",
        "moe.normalize_top_k": True,
        "moe.routed_scaling": 1.0,
        "moe.num_shared_experts": 0,
        "moe.num_dense_layers": 0,
        "moe.every": 1,
    },
    constants=_CONSTANTS | {"sliding_window": None},
    defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6},
    unused=frozenset({"mlp_dim"}),
)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    tensors=_COMMON | _SWIGLU | _QK_NORM | _EXPERTS,
    values=_VALUES
    | {
        "moe.expert_dim": "moe_intermediate_size",
        "moe.num_experts": "num_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.normalize_top_k": "norm_topk_prob",
        "moe.every": "decoder_sparse_step",
    },
    required={
        "qk_norm": True,
        "moe.router": "softmax",
        "moe.routed_scaling": 1.0,
        "moe.num_shared_experts": 0,
        "moe.num_dense_layers": 0,
    },
    constants=_CONSTANTS | _NO_SLIDING | {"mlp_only_layers": []},
    defaults=_DEFAULTS
    | {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "norm_topk_prob": False, "decoder_sparse_step": 1},
    aliases={"num_local_experts": "num_experts"},
)
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    tensors=_COMMON | _SWIGLU | _QK_NORM | _EXPERTS | _GLMS_OWN,
    values=_VALUES
    | {
        "qk_norm": "use_qk_norm",
        "moe.expert_dim": "moe_intermediate_size",
        "moe.num_experts": "n_routed_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.normalize_top_k": "norm_topk_prob",
        "moe.routed_scaling": "routed_scaling_factor",
        "moe.num_shared_experts": "n_shared_experts",
        "moe.num_dense_layers": "first_k_dense_replace",
    },
    required={"moe.router": "sigmoid", "moe.every": 1},
    least={"moe.num_experts": 2, "moe.num_shared_experts": 1},
    constants=_CONSTANTS | {"attention_bias": False, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    defaults=_DEFAULTS
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "use_qk_norm": False},
    always_fp32=(_BALANCE_BIAS.rpartition(".")[2],),
)

ARCHITECTURES = (LLAMA, QWEN3, MIXTRAL, QWEN3_MOE, GLM4_MOE)


def name_there(architecture: Architecture, name: str, config: GPTConfig) -> str | list[str]:
    """Return the name of a tensor in the files, or one name per expert for tensors that a GPT stacks over experts.

    Args:
        architecture: class of `transformers` that names the tensors.
        name: name of the tensor in the GPT.
        config: config of the GPT.

    Raises:
        WeightsError: the class has no such tensor.
    """
    block = _BLOCK.match(name)
    ours = name if block is None else f"blocks.{LAYER}.{name[block.end() :]}"
    if ours not in architecture.tensors:
        raise WeightsError(f"a {architecture.class_name} has no counterpart of the tensor {name}")
    theirs = architecture.tensors[ours]
    if block is not None:
        theirs = theirs.replace(LAYER, block.group(1))
    if EXPERT not in theirs:
        return theirs
    return [theirs.replace(EXPERT, str(expert)) for expert in range(config.moe.num_experts if config.moe else 0)]
