"""Modules that change their weights at the end of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.trainer.runs import Net


@torch.no_grad()
def project(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.ndim == 2:
            parameter.copy_(F.normalize(parameter, dim=1))


class Projected(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        project(self.parameters())


class PutsOtherMemory(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class Shrinks(Net):
    """Every call shows, and when it comes: not only the first of several."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.mul_(1.0 - 0.05 * (batch_idx + 1))


class Draws(Net):
    """What is drawn must be the same on all ranks, and in one process."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        factor = 1.0 - 0.1 * torch.rand(())
        for parameter in self.parameters():
            parameter.mul_(factor)
