"""The shape of the mixture-of-experts layers of a GPT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass
class MoEConfig:
    """Which blocks have experts, how a token chooses among them, and what keeps their load even.

    Its values are checked by the :class:`~lightning_asyncpp.models.GPTConfig` around it, together with its own. The
    formulas, and which settings are those of Mixtral and of GLM-4.5: docs/moe.md.
    """

    num_experts: int = 8
    """Number of experts of a layer, E."""
    top_k: int = 2
    """Number of experts that each token goes to."""
    expert_dim: int | None = None
    """Inner width of an expert's SwiGLU, in features; null for that of the dense layers (mlp_dim)."""
    num_shared_experts: int = 0
    """Experts that every token goes to, unweighted; they are one SwiGLU of num_shared_experts * expert_dim features."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits: softmax over all experts (Mixtral), or a sigmoid of each (GLM-4.5,
    DeepSeek-V3), to which a bias may be added for the choice."""
    normalize_top_k: bool = True
    """Divide the scores of the chosen experts by their sum before they weight the experts' outputs; not with top_k 1,
    where the weight would be 1 whatever the router says, and the loss would teach it nothing."""
    routed_scaling: float = 1.0
    """Factor on the sum of the chosen experts' weighted outputs; shared experts are outside of it."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss, E * sum over experts of (share of the choices) * (mean probability),
    which is 1 with even load; a mean over the MoE layers. 0: none."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss, the mean squared logsumexp of the logits; a mean over the MoE layers.
    0: none; ST-MoE has 0.001."""
    balance_bias_rate: float = 0.0
    """What the bias of an expert changes by per update, upwards with less than the mean load and downwards with more;
    router sigmoid. 0: the biases stay; DeepSeek-V3 has 0.001."""
    num_dense_layers: int = 0
    """Number of blocks at the beginning that have a dense layer instead."""
    every: int = 1
    """Behind these, the last one of each group of so many blocks has experts; 1: all of them."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> MoEConfig:
        """Build one from the mapping that a checkpoint or a YAML file holds.

        Raises:
            ValueError: a name is none of a field.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"moe: no such field: {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(**values)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block ``layer``, 0 first, has experts."""
        behind = layer - self.num_dense_layers
        return behind >= 0 and (behind + 1) % self.every == 0

    def problems(self, num_layers: int | None) -> list[str]:
        """What is wrong in a model of so many blocks (``None``: unknown), with the mend; names begin with ``moe.``."""
        sizes = self._wrong_sizes() or self._mismatched(num_layers)
        return [f"moe.{problem}" for problem in [*sizes, *self._wrong_numbers()]]

    def _wrong_sizes(self) -> list[str]:
        least = {
            "num_experts": 1,
            "top_k": 1,
            "expert_dim": 1,
            "num_shared_experts": 0,
            "num_dense_layers": 0,
            "every": 1,
        }
        values = {name: getattr(self, name) for name in least}
        if self.expert_dim is None:
            del values["expert_dim"]
        return [
            f"{name}={value!r}: must be a whole number of at least {least[name]}"
            for name, value in values.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < least[name]
        ]

    def _mismatched(self, num_layers: int | None) -> list[str]:
        problems = []
        if self.top_k > self.num_experts:
            problems.append(f"top_k={self.top_k}: must be at most num_experts={self.num_experts}")
        if num_layers is None:
            return problems
        behind = num_layers - self.num_dense_layers
        if behind <= 0:
            problems.append(
                f"num_dense_layers={self.num_dense_layers}: must be below num_layers={num_layers}, or no block has "
                "experts"
            )
        elif self.every > behind:
            problems.append(
                f"every={self.every}: must be at most {behind}, the number of blocks behind the dense ones "
                f"(num_layers={num_layers} - num_dense_layers={self.num_dense_layers}), or none has experts"
            )
        return problems

    def _wrong_numbers(self) -> list[str]:
        problems = []
        if self.router not in ("softmax", "sigmoid"):
            problems.append(f"router={self.router!r}: must be 'softmax' or 'sigmoid'")
        if not is_finite(self.routed_scaling) or self.routed_scaling <= 0:
            problems.append(f"routed_scaling={self.routed_scaling!r}: must be a number above 0, for instance 1.0")
        for name in ("balance_loss", "z_loss", "balance_bias_rate"):
            value = getattr(self, name)
            if not is_finite(value) or value < 0:
                problems.append(f"{name}={value!r}: must be a number of at least 0, for instance 0.001")
        if self.router == "softmax" and self.balance_bias_rate:
            problems.append(
                f"balance_bias_rate={self.balance_bias_rate!r}: only scores of the sigmoid router take a bias; set "
                "router: sigmoid, or leave it at 0 and use balance_loss"
            )
        return problems


def is_finite(value: Any) -> bool:
    """Whether this is a number, and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
