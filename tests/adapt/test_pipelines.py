"""Adapted models in pipelines of processes: equal to the oracle, whole in checkpoints, and theirs again afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_asyncpp import pipelined
from lightning_asyncpp.reference import train_reference
from tests.helpers.models import MODELS, batches_for
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, arrays, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4


class Adapted(L.LightningModule):
    """Trains a model that knows nothing of pipelines, or one that was told."""

    def __init__(self, name: str, told: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        model = MODELS[name]()
        self.batches = batches_for(name, model, STEPS)
        self.model = pipelined(model) if told else model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)

    val_dataloader = train_dataloader


def train(name: str, told: bool, strategy: str, folder: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Adapted(name, told)
    options = {"microbatches": 4}
    run = Run(lambda _: module, strategy=strategy, options=options, trainer={"max_epochs": 1, "val_check_interval": 2})
    trainer = make_trainer(run)
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    return {"weights": arrays(dict(trainer.strategy.session.stage.parameters))}


def reference(name: str, delay: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Adapted(name)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in module.batches], optimizer,
        microbatches=4, delay=delay, seed=1, weight=lambda batch: float(len(next(iter(batch.values())))),
    )  # fmt: skip
    return arrays(dict(module.model.named_parameters()))


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("async", "lora"),
        ("sync", "gpt2"),
        pytest.param("async", "gpt2", marks=pytest.mark.slow),
        pytest.param("sync", "lora", marks=pytest.mark.slow),
    ],
)
def test_equals_the_oracle(pools: Pools, name: str, strategy: str, tmp_path: Path) -> None:
    """The strategy cuts it by itself, or it was told before; a checkpoint has the names of the model alone."""
    stages = 3
    results = pools.run(stages, train, name, strategy == "async", strategy, str(tmp_path))
    merged = {key: value for result in results for key, value in result["weights"].items()}
    expected = reference(name, int(strategy == "async"))
    assert_equal_weights(merged, expected)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    plain = Adapted(name, told=False)
    assert sorted(saved) == sorted(plain.state_dict())
    plain.load_state_dict(saved)
