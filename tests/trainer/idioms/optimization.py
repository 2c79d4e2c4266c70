"""Idioms of the pages on optimization and training tricks."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, StepLR

from lightning_asyncpp import after_own_update
from tests.helpers.cases import DIM
from tests.helpers.modules import HasAverage
from tests.helpers.projections import Projected
from tests.helpers.trainer import Net, Run
from tests.trainer.idioms import NO, NOTE, REFUSED, WORKS, Idiom


class StepsEverySecond(Net):
    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02)
        schedule = {"scheduler": StepLR(optimizer, step_size=1, gamma=0.7), "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class OneCycle(Net):
    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02)
        total = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.05, total_steps=total), "interval": "step"}]


class OwnScheduler(Net):
    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch >= 0:
            scheduler.step()


class OwnOptimizerStep(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class EverySecondBatch(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class WarmUp(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * min(1.0, float(self.trainer.global_step + 1) / 6)


class ZeroesInPlace(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ClipsLater(Net):
    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        value = 0.01 if self.current_epoch == 0 and self.trainer.global_step < 3 else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class LogsGradientNorm(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))


class LooksAtGradients(Net):
    """Right after the backward, where there are none here."""

    def on_after_backward(self) -> None:
        self.seen = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class SetsTheRate(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.01 * (1 + batch_idx)


class LogsTheRate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [SGD(self.model[:4].parameters(), lr=0.1), SGD(self.model[4:].parameters(), lr=0.1)]  # type: ignore[index]


class Manual(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False


class TrainedParts(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        for layer in list(self.model.children())[:-2]:
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.02)


class DecaysMatricesOnly(Net):
    """One group of which may be empty on a stage."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.02)


class DecaysByPosition(Net):
    def configure_optimizers(self) -> Any:
        return SGD([{"params": [p], "lr": 0.05 / (1 + i)} for i, p in enumerate(self.parameters())])


class DecaysByLayer(Net):
    def configure_optimizers(self) -> Any:
        layers: Any = enumerate(self.model)  # type: ignore[arg-type]
        return SGD([{"params": list(x.parameters()), "lr": 0.05 / (1 + i)} for i, x in layers])


class LogsTheNorm(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("norm", sum(p.detach().norm() for p in pl_module.parameters()))


class Backbone(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        del self.model
        self.backbone, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch["x"])), batch["y"])


SCHEDULER = "A schedule sees batches as a single process does."
IDIOMS = [
    Idiom('`configure_optimizers` with `"interval": "step", "frequency": 2`', WORKS, SCHEDULER, StepsEverySecond),
    Idiom("`OneCycleLR(total_steps=self.trainer.estimated_stepping_batches)`", WORKS, "", OneCycle),
    Idiom("`lr_scheduler_step` of one's own", WORKS, "", OwnScheduler),
    Idiom("`optimizer_step(...)`: `optimizer.step(closure=optimizer_closure)`", WORKS, "", OwnOptimizerStep),
    Idiom("... a learning rate set after `optimizer.step(...)` (warm-up)", WORKS, "", WarmUp),
    Idiom("... a step at arbitrary intervals, `optimizer_closure()` otherwise", WORKS,
          "Gradients of the other batches are dropped.", EverySecondBatch, metrics=False,
          processes=True),
    Idiom("... weights changed after `optimizer.step(...)`", NO,
          "The update comes later: `after_own_update(callback)`, or `optimizer.register_step_post_hook`."),
    Idiom("... `optimizer.optimizer.step(...)`", NO, "Step the optimizer that the hook gets."),
    Idiom("`optimizer_zero_grad`: `optimizer.zero_grad(set_to_none=False)`", WORKS, "", ZeroesInPlace),
    Idiom("`configure_gradient_clipping` with `self.clip_gradients(...)`", WORKS, "", ClipsLater),
    Idiom("`torch.nn.utils.clip_grad_norm_` in `on_before_optimizer_step`", NO,
          "It knows the norm of one stage: `gradient_clip_val`, or `self.clip_gradients(...)`."),
    Idiom("`self.log_dict(grad_norm(...))` in `on_before_optimizer_step`", NOTE,
          "The norms of the last stage's layers, and their total; `gradient_clip_val` uses that of all.",
          LogsGradientNorm, metrics=False, processes=True),
    Idiom("gradients in `on_after_backward`", NOTE,
          "Called without gradients: `on_before_optimizer_step` has them.", LooksAtGradients),
    Idiom("a learning rate set in a hook", WORKS, "", SetsTheRate),
    Idiom("`self.optimizers()` in a step, to log the learning rate", WORKS, "", LogsTheRate),
    Idiom("several optimizers", REFUSED, "One optimizer with groups.", TwoOptimizers, says="more than one optimizer"),
    Idiom("`automatic_optimization = False`", REFUSED,
          "So is what needs it: GANs, truncated backpropagation through time.", Manual,
          says="automatic_optimization=False"),
    Idiom("`filter(lambda p: p.requires_grad, self.parameters())`", WORKS, "Also on a stage that trains nothing.",
          TrainedParts, processes=True),
    Idiom("groups of parameters with options of their own", WORKS, "", DecaysMatricesOnly),
    Idiom("... by the position of a layer (`enumerate(self.model)`)", WORKS, "", DecaysByLayer),
    Idiom("... by the position of a parameter (`enumerate(self.parameters())`)", WORKS, "", DecaysByPosition,
          processes=True),
    Idiom("`trainer.optimizers = [...]` in the middle of a training", NO,
          "Change `param_groups`, or train in two parts."),
    Idiom("layers frozen or unfrozen during the training", NO, "Freeze before, or train in two parts."),
    Idiom("`torch.nn.utils.prune` in a hook", NO, "Before the training, or between two."),
    Idiom("weights read or changed in `on_train_batch_end` (a mean, a projection, the norm of an update, a swap)", NO,
          "**One update old there**: a callback, given to the Trainer as `after_own_update(callback)`."),
    Idiom("... read in that of `lightning_asyncpp.after_own_update(callback)`", WORKS,
          "Called once its batch's update has been applied.", callbacks=(lambda: after_own_update(LogsTheNorm()),)),
    Idiom("... changed in that of `lightning_asyncpp.after_own_update(callback)`", WORKS,
          "The change is part of its batch's update.", Projected),
    Idiom("... `AveragedModel(self.model)`, updated in that of `lightning_asyncpp.after_own_update(callback)`", WORKS,
          "Each stage averages its layers; checkpoints hold all.", HasAverage, processes=True),
    Idiom("weights read after `super().optimizer_step(...)`, in `on_train_batch_start` or `on_before_zero_grad`", NO,
          "**One update old there**: `after_own_update(callback)`, or `strategy.drain()` first."),
    Idiom("a penalty on `self.parameters()` in the step", NO,
          "The last stage has only its own: `add_auxiliary_loss` in the layers, or weight decay."),
    Idiom("`loss.backward()` in `training_step`", NO,
          "The pipeline runs the backward, on all stages: leave it out."),
    Idiom("`torch.autograd.grad(..., batch)` in the step", NO,
          "Input and loss are on different stages: within one layer."),
    Idiom("`self.backbone` and `self.head`, called one by one in the step, no `self.model`", REFUSED,
          "Call both in `forward`, and `self(...)` in the step; or put both into `self.model`.", Backbone,
          says="has no self.model"),
    Idiom("`accumulate_grad_batches=2`", NOTE,
          "What steps log is averaged over the batches that share an update.",
          trainer={"accumulate_grad_batches": 2}, processes=True),
    Idiom("`gradient_clip_val=0.1`", WORKS, "Over all stages.", trainer={"gradient_clip_val": 0.1}),
    Idiom('`gradient_clip_algorithm="value"`', WORKS, "",
          trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
]  # fmt: skip
