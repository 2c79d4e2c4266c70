"""Idioms of the pages on optimization and training tricks."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from lightning_asyncpp import after_own_update
from tests.helpers.cases import DIM
from tests.helpers.modules import HasAverage
from tests.helpers.projections import Projected
from tests.helpers.trainer import Net, Run
from tests.trainer.idioms import Idiom


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [SGD(self.model.parameters(), 0.1), SGD(self.model.parameters(), 0.1)]


class LogsTheNorm(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("norm", sum(p.detach().norm() for p in pl_module.parameters()))


class OwnHooks(Net):
    """Model with many hooks of an update: warm-up, scheduler step; gradients zeroed, clipped and read; weights read."""

    def configure_callbacks(self) -> list[L.Callback]:
        return [after_own_update(LogsTheNorm())]

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02)
        schedule = {"scheduler": StepLR(optimizer, step_size=1, gamma=0.7), "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch >= 0:
            scheduler.step()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * min(1.0, float(self.trainer.global_step + 1) / 4)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        value = 0.01 if self.current_epoch == 0 and self.trainer.global_step < 2 else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")

    def on_after_backward(self) -> None:
        self.seen = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class OneCycle(Net):
    """Model with a OneCycleLR for two parameter groups, of which one may be empty on a stage."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        optimizer = AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.02)
        total = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.05, total_steps=total), "interval": "step"}]


class EverySecondBatch(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class LogsGradientNorm(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))


class Manual(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False


class Groups(Net):
    """Model with one group per trained parameter, by its position and its layer's; a hook changes the rates."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        for layer in list(self.model.children())[:3]:
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        layers: Any = enumerate(self.model)  # type: ignore[arg-type]
        rates = [0.05 / (1 + i) for i, layer in layers for p in layer.parameters() if p.requires_grad]
        trained = filter(lambda p: p.requires_grad, self.parameters())
        return SGD([{"params": [p], "lr": rates[i] / (1 + 0.1 * i)} for i, p in enumerate(trained)])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] *= 0.9

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class Backbone(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        del self.model
        self.backbone, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch["x"])), batch["y"])


IDIOMS = [
    Idiom(
        "frequency | lr_scheduler_step | optimizer_closure)` | warm-up | optimizer_zero_grad | configure_gradient"
        " | on_after_backward | weights read", OwnHooks,
    ),
    Idiom(
        "OneCycleLR | groups of | clip_algorithm", OneCycle,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Idiom("arbitrary intervals", EverySecondBatch, metrics=False, processes=True),
    Idiom("log_dict(grad_norm", LogsGradientNorm, metrics=False, processes=True),
    Idiom("several optimizers", TwoOptimizers, says="more than one optimizer"),
    Idiom("automatic_optimization", Manual, says="automatic_optimization=False"),
    Idiom(
        "a learning rate set in a hook | self.optimizers() | filter( | position of a layer | position of a parameter",
        Groups, processes=True,
    ),
    Idiom("weights changed", Projected),
    Idiom("AveragedModel", HasAverage, processes=True),
    Idiom("called one by one", Backbone, says="has no self.model"),
    Idiom("accumulate | val=0.1", trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, processes=True),
]  # fmt: skip
