"""Batches of random tokens, for recipes of the tests."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Tokens(L.LightningDataModule):
    """Random tokens, (batch_size, context_length + 1) each batch."""

    def __init__(self, batch_size: int, context_length: int, vocab_size: int, batches: int = 8) -> None:
        super().__init__()
        self.batch_size, self.context_length, self.vocab_size, self.batches = (
            batch_size, context_length, vocab_size, batches
        )  # fmt: skip

    def example_batch(self) -> Tensor:
        return torch.zeros(self.batch_size, self.context_length + 1, dtype=torch.int64)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        shape = (self.batch_size * self.batches, self.context_length + 1)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        return DataLoader(tokens.tolist(), self.batch_size, collate_fn=torch.tensor)
