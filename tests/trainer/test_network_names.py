"""A network under another name than ``model`` trains, resumes and is evaluated as one under that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError, check_model
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import EPOCHS, check_resumed, fit_showing, run_of
from tests.helpers.trainer import Net, Run, loader


class Backbone(Net):
    """Around a ``self.backbone``; the text that it has as its ``model`` says which."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        network = self.model
        del self.model
        self.model = "linear layers"  # type: ignore[assignment]
        self.backbone = network

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self.backbone(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.mse_loss(self.backbone(batch["x"]), batch["y"]), prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self.backbone(batch["x"]), batch["y"]))


@pytest.mark.parametrize("strategy", ["default", pytest.param("delayed", marks=pytest.mark.slow)])
def test_trains_and_resumes(pools: Pools, strategy: str, tmp_path: Path) -> None:
    options = {"microbatches": 2} if strategy == "delayed" else {}
    of_usual = run_of(tmp_path / "usual", "litdata", EPOCHS, strategy=strategy, options=options)
    run = replace(run_of(tmp_path, "litdata", EPOCHS, strategy=strategy, options=options), module=Backbone)
    stages = 2 if strategy == "default" else 1
    found = check_resumed(pools, run, "litdata", tmp_path, [3], stages)
    usual = pools.run(stages, fit_showing, of_usual, "litdata", str(tmp_path / "data"))
    weights = joined_weights(found, stages)
    assert_equal_weights(
        {name.replace("backbone.", "model."): w for name, w in weights.items()}, joined_weights(usual, stages)
    )


def test_messages_name_it() -> None:
    class Twice(Backbone):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            self.backbone(batch["x"])
            return super().training_step(batch, batch_idx)

    run = Run(Twice)
    with pytest.raises(ConfigurationError, match=r"after calling twice self\.backbone"):
        check_model(Twice(run), list(loader(run)))
    module = Backbone(run)
    assert check_model(module, list(loader(run))).ok
