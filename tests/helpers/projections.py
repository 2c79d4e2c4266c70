"""Modules whose weights a callback changes at the end of a batch, after the batch's own update."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.nn import functional as F

from lightning_asyncpp.trainer.batch_ends import after_own_update
from tests.helpers.trainer import Net


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer; where one process runs all stages, the module has more than these."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def project(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.ndim == 2:
            parameter.copy_(F.normalize(parameter, dim=1))


class _Changes(L.Callback):
    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.change(batch_idx)


class Changing(Net):
    """Module whose callback calls ``change`` after every batch's own update."""

    def configure_callbacks(self) -> list[L.Callback]:
        return [after_own_update(_Changes())]

    def change(self, batch_idx: int) -> None:
        raise NotImplementedError


class Projected(Changing):
    def change(self, batch_idx: int) -> None:
        project(self.parameters())


class PutsOtherMemory(Changing):
    def change(self, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class Shrinks(Changing):
    """Module that scales its weights by a factor of the batch, so that every call and its time affect the result."""

    def change(self, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.mul_(1.0 - 0.05 * (batch_idx + 1))


class Draws(Changing):
    """Module that scales its weights by a random number, which must be the same on all ranks and in one process."""

    def change(self, batch_idx: int) -> None:
        factor = 1.0 - 0.1 * torch.rand(())
        for parameter in self.parameters():
            parameter.mul_(factor)


class OnSomeRanks(Changing):
    """Module that has a callback after the batch's own update on rank 1 only."""

    def configure_callbacks(self) -> list[L.Callback]:
        return super().configure_callbacks() if self.trainer.global_rank == 1 else []

    def change(self, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-0.2, 0.2)
