"""Keys and values that attention keeps while a sequence grows by one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """What one attention layer computed for the tokens so far."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None  # (batch, kv_heads, length, head_dim), turned to their positions
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens in it."""
        return 0 if self._keys is None else self._keys.shape[-2]

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of further tokens, (batch, kv_heads, time, head_dim); returns those of all tokens.

        Raises:
            ValueError: it is not empty, and more than one token comes: attention would let them see each other.
        """
        if self._keys is None or self._values is None:
            self._keys, self._values = key, value
        elif key.shape[-2] != 1:
            raise ValueError(
                f"{key.shape[-2]} tokens for a cache that holds {self.length}: only one may follow at a time"
            )
        else:
            self._keys = torch.cat((self._keys, key), dim=-2)
            self._values = torch.cat((self._values, value), dim=-2)
        return self._keys, self._values
