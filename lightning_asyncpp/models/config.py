"""The shape of a dense GPT."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GPTConfig:
    """The shape and the initialisation of a dense GPT; a wrong value is reported when the config is built."""

    vocab_size: int = 256
    """Number of token ids that the model knows: the rows of the embedding and the width of the logits."""
    context_length: int = 256
    """Longest sequence that the model takes, in tokens."""
    num_layers: int = 6
    """Number of transformer blocks."""
    dim: int = 384
    """Width of the residual stream, in features."""
    num_heads: int = 6
    """Number of query heads per block; each is dim / num_heads features wide."""
    num_kv_heads: int | None = None
    """Number of key and value heads per block (grouped-query attention); null for as many as num_heads."""
    mlp_dim: int | None = None
    """Inner width of the SwiGLU layer, in features; null for 8/3 * dim rounded up to a multiple of 64."""
    rope_base: float = 10_000.0
    """Base of the rotary position embedding: its longest wavelength is 2 pi * rope_base tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each residual branch."""
    tie_embeddings: bool = False
    """Share one matrix between the embedding and the head; a pipeline of several stages cannot."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""

    def __post_init__(self) -> None:
        problems = self._wrong_sizes() or self._mismatched_sizes()
        problems += self._wrong_numbers()
        if problems:
            raise ValueError("GPTConfig cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads per block, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of the SwiGLU layer, with the default filled in."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return -(-8 * self.dim // (3 * 64)) * 64

    def num_parameters(self) -> int:
        """Number of trainable values of the whole model; a shared matrix counts once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.mlp_width + 2 * self.dim
        matrices = 1 if self.tie_embeddings else 2
        return matrices * self.vocab_size * self.dim + self.num_layers * block + self.dim

    def flops_per_token(self) -> float:
        """Floating-point operations of a forward and its backward per token of a sequence of ``context_length``.

        Two per weight and token forward, twice that backward; attention counts without the half that causality saves,
        as in Chowdhery et al., "PaLM" (2022). Reading the embedding multiplies nothing.
        """
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        matrices = self.num_layers * (attention + 3 * self.dim * self.mlp_width) + self.dim * self.vocab_size
        return 6.0 * matrices + 12.0 * self.num_layers * self.dim * self.context_length

    def _wrong_sizes(self) -> list[str]:
        sizes = {
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "num_layers": self.num_layers,
            "dim": self.dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.kv_heads,
            "mlp_dim": 1 if self.mlp_dim is None else self.mlp_dim,
        }
        return [
            f"{name}={value!r}: must be a whole number of at least 1"
            for name, value in sizes.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]

    def _mismatched_sizes(self) -> list[str]:
        problems = []
        if self.dim % self.num_heads:
            problems.append(f"num_heads={self.num_heads}: must divide dim={self.dim}")
        elif self.head_dim % 2:
            problems.append(
                f"num_heads={self.num_heads}: gives heads of dim / num_heads = {self.head_dim} features, and rotary "
                "embeddings turn pairs; choose dim and num_heads so that the quotient is even"
            )
        if self.num_heads % self.kv_heads:
            problems.append(f"num_kv_heads={self.kv_heads}: must divide num_heads={self.num_heads}")
        return problems

    def _wrong_numbers(self) -> list[str]:
        problems = []
        if not self.rope_base > 1:
            problems.append(f"rope_base={self.rope_base!r}: must be above 1, for instance 10000.0")
        if not self.norm_eps > 0:
            problems.append(f"norm_eps={self.norm_eps!r}: must be above 0, for instance 1e-5")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout!r}: must be at least 0 and below 1")
        if not self.init_std > 0:
            problems.append(f"init_std={self.init_std!r}: must be above 0, for instance 0.02")
        return problems
