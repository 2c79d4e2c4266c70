"""Modules that make optimizers and schedules, and step them, in their own ways."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.helpers.trainer import Net, Run


class StepsEverySecond(Net):
    """A scheduler that steps after every second batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class OneCycle(Net):
    """A scheduler that must know the number of updates."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(total))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class OwnScheduler(Net):
    """A scheduler that needs the epoch, as timm's do."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch >= 0:
            scheduler.step()


class OwnOptimizerStep(Net):
    """The hook as the page shows it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class EverySecondBatch(Net):
    """A step at arbitrary intervals; the other gradients are dropped."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class WarmUp(Net):
    """A learning rate that is warmed up by hand, after the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * min(1.0, float(self.trainer.global_step + 1) / 6)


class ZeroesInPlace(Net):
    """Gradients that are zeroed instead of let go of."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class SetsTheRate(Net):
    """A learning rate that a hook sets."""

    def on_train_epoch_start(self) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.01 * (1 + self.current_epoch)


class LogsTheRate(Net):
    """The learning rate, logged in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class TwoOptimizers(Net):
    """A generator and a discriminator."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Manual(Net):
    """Manual optimization, as for GANs and truncated backpropagation through time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.mse_loss(self.model(batch["x"]), batch["y"]))
        self.optimizers().step()  # type: ignore[union-attr]


class TrainedParts(Net):
    """An optimizer over what is to be trained, where a stage trains nothing."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        for layer in list(self.model.children())[:-2]:
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.02)


class DecaysMatricesOnly(Net):
    """Groups of parameters, one of which may be empty on a stage."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.02)


class DecaysByPosition(Net):
    """A learning rate for every parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [p], "lr": 0.05 / (1 + i)} for i, p in enumerate(self.parameters())])


class DecaysByLayer(Net):
    """A learning rate for every layer."""

    def configure_optimizers(self) -> Any:
        layers: Any = enumerate(self.model)  # type: ignore[arg-type]
        return torch.optim.SGD([{"params": list(x.parameters()), "lr": 0.05 / (1 + i)} for i, x in layers])
