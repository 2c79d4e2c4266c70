"""Logits of the token that follows, computed for the new tokens of a growing sequence alone."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_asyncpp.models.block import Block
from lightning_asyncpp.models.cache import KeyValueCache
from lightning_asyncpp.models.gpt import GPT


class CachedLogits:
    """A model in one process as :func:`~lightning_asyncpp.models.sampling.generate_tokens` wants it.

    Where a sequence does not continue the one before, as when the oldest tokens slide out of the context, all of it is
    computed: every position has changed.

    Args:
        model: in evaluation mode.
        device: where it is.
    """

    def __init__(self, model: GPT, device: torch.device | str = "cpu") -> None:
        self.model, self.device = model, device
        self._blocks = [block for block in model.blocks if isinstance(block, Block)]
        self._caches: list[KeyValueCache] = []
        self._seen: list[int] = []

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows ``tokens`` (1, time): (1, vocab_size)."""
        sequence = tokens[0].tolist()
        continues = 0 < len(self._seen) < len(sequence) <= self.model.config.context_length
        continues = continues and sequence[: len(self._seen)] == self._seen
        if not continues:
            self._seen, self._caches = [], [KeyValueCache() for _ in self._blocks]
        new = tokens[:, len(self._seen) :].to(self.device)
        for part in new.split(1, dim=1) if continues else (new,):
            logits = self._run(part)
        self._seen = sequence
        return logits

    def _run(self, tokens: Tensor) -> Tensor:
        for block, cache in zip(self._blocks, self._caches):
            block.attention.cache = cache
        try:
            x = self.model.embedding(tokens)  # (1, time, dim)
            for block in self._blocks:
                x = block(x)
            logits: Tensor = self.model.head(x[:, -1:])[:, -1]
        finally:
            for block in self._blocks:
                block.attention.cache = None
        return logits
