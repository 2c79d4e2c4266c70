"""A training whose micro-batches have unequal numbers of targets, and that nobody weighs, says so once."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_asyncpp import AsyncPipelineStrategy, DelayedGradientStrategy
from tests.core.cases import DIM, make_model
from tests.trainer.pool import Pools


class Labelled(Dataset):
    """Of every four samples the last two have labels."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((DIM,), 0.1), "labels": torch.tensor([0, 0] if index % 4 > 1 else [0, -100])}


class LabelledNet(L.LightningModule):
    """Returns the mean over labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(0.0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["x"]).expand(-1, 4).reshape(-1, 2) * torch.tensor([1.0, -1.0])
        return F.cross_entropy(logits, batch["labels"].reshape(-1))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WeighingNet(LabelledNet):
    """Says how many there are."""

    def micro_batch_weight(self, micro_batch: dict[str, Tensor]) -> Tensor:
        return (micro_batch["labels"] != -100).sum()


def heard(strategy: str, devices: int, kind: type[LabelledNet] = LabelledNet, only_evaluates: bool = False) -> int:
    """How often it was told."""
    made: Any = (AsyncPipelineStrategy if strategy == "async" else DelayedGradientStrategy)(micro_batches=2)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=made, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    loader = DataLoader(Labelled(), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if only_evaluates:
            trainer.validate(kind(), loader, verbose=False)
        else:
            trainer.fit(kind(), loader, loader)
    return sum("unequal numbers of targets (micro_batch['labels']" in str(warning.message) for warning in caught)


def test_rank_0_tells_once(pools: Pools) -> None:
    assert pools.run(2, heard, "async", 2) == [1, 0]
    assert pools.run(1, heard, "async", 1) == [1]
    assert pools.run(1, heard, "delayed", 1) == [1]


@pytest.mark.parametrize(("kind", "only_evaluates"), [(WeighingNet, False), (LabelledNet, True)])
def test_weights_and_evaluations_are_silent(pools: Pools, kind: type[LabelledNet], only_evaluates: bool) -> None:
    assert pools.run(2, heard, "async", 2, kind, only_evaluates) == [0, 0]
