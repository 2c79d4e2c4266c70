"""All strategies train LightningModules without support for pipelines in the same way.

A module wraps a model such as nanoGPT's, or is the network: its layers are attributes, its steps call ``self(...)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp import fabric
from tests.adapt.home_made import DIM, TIME, VOCABULARY, NanoGPT
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, make_trainer

CLASSES, STEPS = 3, 6
EMULATED = {"stages": 2, "microbatches": 4}


class Sharing(L.LightningModule):
    """LightningModule whose training and validation steps share a method."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.share(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.share(batch, "val_loss")

    def share(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log(name, loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches(), batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        x = torch.randn(STEPS, 8, DIM, generator=torch.Generator().manual_seed(0))
        return list(zip(x, x[:, :, :CLASSES].argmax(-1)))


class Classifier(Sharing):
    """Network as in Lightning's first examples, with a parameter, a buffer and a number besides its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.dropout = nn.Linear(DIM, DIM), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.last, self.scale = nn.Linear(DIM, CLASSES), nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("shift", torch.ones(CLASSES))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.dropout(self.first(x).relu())
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * self.scale + self.shift


class Plain(Classifier):
    """Network whose only parameters are in two layers; after the cut, one of them is on another stage."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.scale
        self.first.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return an output that depends on the mode of a layer, which was set before the training."""
        return self.last(self.first(x).tanh()) * (2.0 if self.first.training else 1.0)

    def configure_callbacks(self) -> Any:
        return [WeightAveraging(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.5))]


class LitGPT(Sharing):
    """LightningModule around a model whose forward computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = NanoGPT()

    def share(self, batch: Any, name: str) -> Tensor:
        loss = self.network(*batch)[1]
        self.log(name, loss)
        return loss

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        tokens = torch.randint(VOCABULARY, (STEPS, 8, TIME + 1), generator=torch.Generator().manual_seed(0))
        return [(each[:, :-1], each[:, 1:]) for each in tokens]


def fit(
    processes: int, kind: type[Sharing], saved: str = "", resumed: str | None = None, epochs: int = 1
) -> tuple[dict[str, Any], float]:
    """Train, and return the weights (in a pipeline, only this stage's) and the last validation loss."""
    L.seed_everything(1, verbose=False)
    module = kind()
    how: tuple[str, dict[str, Any]] = ("default", {"microbatches": 4}) if processes else ("delayed", EMULATED)
    trainer: Any = make_trainer(Run(Net, *how), max_epochs=epochs)
    trainer.fit(module, ckpt_path=resumed)
    if saved:
        trainer.save_checkpoint(saved)
    network = module.network if kind is LitGPT else module  # type: ignore[attr-defined]
    found = trainer.strategy.session.stage.parameters if processes else network
    return arrays(dict(found if processes else found.named_parameters())), float(trainer.callback_metrics["val_loss"])


def test_a_pipeline_trains_a_network_as_one_process_does(pools: Pools, tmp_path: Path) -> None:
    """A pipeline's checkpoint has the names of the module's ``state_dict``, and one process can resume from it."""
    expected, loss = fit(0, Classifier, epochs=2)
    results = pools.run(2, fit, 2, Classifier, str(tmp_path / "half.ckpt"))
    assert_equal_weights(joined_parts([weights for weights, _ in results]), fit(0, Classifier)[0])
    resumed, again = fit(0, Classifier, resumed=str(tmp_path / "half.ckpt"), epochs=2)
    assert_equal_weights(resumed, expected)
    assert again == loss
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert sorted(state) == sorted(Classifier().state_dict())


def test_once_cut_it_is_the_network_still_and_its_averages_are_cut_with_it(pools: Pools) -> None:
    weights = [weights for weights, _ in pools.run(2, fit, 2, Plain)]
    assert_equal_weights(joined_parts(weights), fit(0, Plain)[0])


def loop() -> dict[str, Any]:
    """Train nanoGPT's model in Fabric with all stages in this process, and return its weights."""
    strategy: Any = fabric.DelayedGradientStrategy(**EMULATED)  # type: ignore[arg-type]
    run = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    run.launch()
    run.seed_everything(1, verbose=False)
    model = run.setup_module(LitGPT().network)
    optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in LitGPT().batches():
        strategy.training_step(lambda part: model(*part)[1], batch)
        optimizer.step()
        optimizer.zero_grad()
    strategy.drain()
    return arrays(dict(model.module.named_parameters()))


def test_every_strategy_trains_nano_gpt_alike(pools: Pools) -> None:
    """Two processes (rank 0 is the last stage) and one process agree; the tied weight has the first of its names."""
    expected, _ = fit(0, LitGPT)
    last, first = (weights for weights, _ in pools.run(2, fit, 2, LitGPT))
    assert (last.pop("transformer.wte.weight") == first["transformer.wte.weight"]).all()
    assert_equal_weights(joined_parts([first, last]), expected)
    assert_equal_weights(loop(), expected)
