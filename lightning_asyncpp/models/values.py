"""The values of a config with all defaults filled in, flat, for comparisons."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_asyncpp.models.config import GPTConfig

# Of no meaning to a model that was trained.
TRAINING_ONLY = frozenset({"dropout", "moe.balance_loss", "moe.z_loss", "moe.balance_bias_rate"})
# Two models that differ in these can have the same weights.
_FREE = TRAINING_ONLY | {"context_length", "init_std"}


def values_of(config: GPTConfig) -> dict[str, Any]:
    """All values of a config; those of a nested one have its name before a dot."""
    values: dict[str, Any] = {}
    for name, value in asdict(config).items():
        nested = {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        values |= nested
    values |= {"num_kv_heads": config.kv_heads, "mlp_dim": config.mlp_width, "head_dim": config.head_width}
    return values if config.moe is None else values | {"moe.expert_dim": config.expert_width}


def differences(config: GPTConfig, saved: GPTConfig) -> list[str]:
    """Where a model of ``config`` cannot take the weights of a model of ``saved``, with both values."""
    wanted, found = values_of(config), values_of(saved)
    free = _FREE | ({"mlp_dim"} if 0 < config.num_moe_layers == config.num_layers else set())  # no block is that wide
    return [
        f"{name}={wanted.get(name)!r}, and the weights are those of a model with {name}={found.get(name)!r}"
        for name in dict.fromkeys((*wanted, *found))
        if name not in free and wanted.get(name) != found.get(name)
    ]
