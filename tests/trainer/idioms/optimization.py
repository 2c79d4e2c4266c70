"""Idioms of the pages on optimization and training tricks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from lightning_asyncpp import after_own_update
from tests.helpers.cases import DIM
from tests.helpers.trainer import Net, Run
from tests.trainer.idioms.entry import NO, NOTE, REFUSED, WORKS, Idiom
from tests.trainer.idioms.optimizers import (
    DecaysByLayer,
    DecaysByPosition,
    DecaysMatricesOnly,
    EverySecondBatch,
    LogsTheRate,
    Manual,
    OneCycle,
    OwnOptimizerStep,
    OwnScheduler,
    SetsTheRate,
    StepsEverySecond,
    TrainedParts,
    TwoOptimizers,
    WarmUp,
    ZeroesInPlace,
)


class ClipsLater(Net):
    """Clipping that depends on the epoch and the step."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = 0.01 if self.current_epoch == 0 and self.trainer.global_step < 3 else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class LogsGradientNorm(Net):
    """The page's way to look out for exploding gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.log_dict(grad_norm(self.model, norm_type=2))


class LooksAtGradients(Net):
    """Gradients right after the backward, where there are none here."""

    def on_after_backward(self) -> None:
        self.seen = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class Projects(L.Callback):
    """Weights that are projected after every step."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.ndim == 2:
                parameter.copy_(F.normalize(parameter, dim=1))


def projecting_callback() -> L.Callback:
    """One that changes weights when the batch's own update has been applied."""
    return after_own_update(Projects())


class Averages(Net):
    """An average of the weights in the module, as torch's own."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average).requires_grad_(False)

    def configure_callbacks(self) -> list[L.Callback]:
        return [after_own_update(UpdatesAverage())]


class UpdatesAverage(L.Callback):
    """Brings the module's average up to date."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.ema.update_parameters(pl_module.model)


class Backbone(Net):
    """Layers in several attributes, as the page on transfer learning has them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        del self.model
        self.backbone, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch["x"])), batch["y"])


class KeepsAMean(L.Callback):
    """A mean of the weights after every update."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weights = [p.detach().clone() for p in pl_module.parameters()]
        means = getattr(self, "means", weights)
        self.means = [mean.lerp(weight, 0.5) for mean, weight in zip(means, weights)]


def averaging_callback() -> L.Callback:
    """One that reads weights when the batch's own update has been applied."""
    return after_own_update(KeepsAMean())


SCHEDULER = "A schedule sees batches as a single process does."
IDIOMS = [
    Idiom('`configure_optimizers` with `"interval": "step", "frequency": 2`', WORKS, SCHEDULER, StepsEverySecond),
    Idiom("`OneCycleLR(total_steps=self.trainer.estimated_stepping_batches)`", WORKS, "", OneCycle),
    Idiom("`lr_scheduler_step` of one's own", WORKS, "", OwnScheduler),
    Idiom("`optimizer_step(...)`: `optimizer.step(closure=optimizer_closure)`", WORKS, "", OwnOptimizerStep),
    Idiom("... a learning rate set after `optimizer.step(...)` (warm-up)", WORKS, "", WarmUp),
    Idiom(
        "... a step at arbitrary intervals, `optimizer_closure()` otherwise",
        WORKS,
        "Gradients of the other batches are dropped.",
        EverySecondBatch,
        metrics=False,
    ),
    Idiom(
        "... weights changed after `optimizer.step(...)`",
        NO,
        "The update comes later: `after_own_update(callback)`, or `optimizer.register_step_post_hook`.",
    ),
    Idiom("... `optimizer.optimizer.step(...)`", NO, "Step the optimizer that the hook gets."),
    Idiom("`optimizer_zero_grad`: `optimizer.zero_grad(set_to_none=False)`", WORKS, "", ZeroesInPlace),
    Idiom("`configure_gradient_clipping` with `self.clip_gradients(...)`", WORKS, "", ClipsLater),
    Idiom(
        "`torch.nn.utils.clip_grad_norm_` in `on_before_optimizer_step`",
        NO,
        "It knows the norm of one stage: `gradient_clip_val`, or `self.clip_gradients(...)`.",
    ),
    Idiom(
        "`self.log_dict(grad_norm(...))` in `on_before_optimizer_step`",
        NOTE,
        "The norms of the last stage's layers, and their total; `gradient_clip_val` uses that of all.",
        LogsGradientNorm,
        metrics=False,
    ),
    Idiom(
        "gradients in `on_after_backward`",
        NOTE,
        "Called without gradients: `on_before_optimizer_step` has them.",
        LooksAtGradients,
    ),
    Idiom("a learning rate set in a hook", WORKS, "", SetsTheRate),
    Idiom("`self.optimizers()` in a step, to log the learning rate", WORKS, "", LogsTheRate),
    Idiom("several optimizers", REFUSED, "One optimizer with groups.", TwoOptimizers, says="more than one optimizer"),
    Idiom(
        "`automatic_optimization = False`",
        REFUSED,
        "So is what needs it: GANs, truncated backpropagation through time.",
        Manual,
        says="automatic_optimization=False",
    ),
    Idiom(
        "`filter(lambda p: p.requires_grad, self.parameters())`",
        WORKS,
        "Also on a stage that trains nothing.",
        TrainedParts,
    ),
    Idiom("groups of parameters with options of their own", WORKS, "", DecaysMatricesOnly),
    Idiom("... by the position of a layer (`enumerate(self.model)`)", WORKS, "", DecaysByLayer),
    Idiom(
        "... by the position of a parameter (`enumerate(self.parameters())`)",
        WORKS,
        "",
        DecaysByPosition,
    ),
    Idiom(
        "`trainer.optimizers = [...]` in the middle of a training",
        NO,
        "Change `param_groups`, or train in two parts.",
    ),
    Idiom(
        "layers frozen or unfrozen during the training",
        NO,
        "Freeze before, or train in two parts.",
    ),
    Idiom(
        "`torch.nn.utils.prune` in a hook",
        NO,
        "Before the training, or between two.",
    ),
    Idiom(
        "weights read or changed in `on_train_batch_end` (a mean, a projection, the norm of an update, a swap)",
        NO,
        "**One update old there**: a callback, given to the Trainer as `after_own_update(callback)`.",
    ),
    Idiom(
        "... read in that of `lightning_asyncpp.after_own_update(callback)`",
        WORKS,
        "Called once its batch's update has been applied.",
        more={"callbacks": ((averaging_callback, {}),)},
        label="reads-in-a-marked-callback",
    ),
    Idiom(
        "... changed in that of `lightning_asyncpp.after_own_update(callback)`",
        WORKS,
        "The change is part of its batch's update.",
        more={"callbacks": ((projecting_callback, {}),)},
        label="changes-in-a-marked-callback",
    ),
    Idiom(
        "... `AveragedModel(self.model)`, updated in that of `lightning_asyncpp.after_own_update(callback)`",
        WORKS,
        "Each stage averages its layers; checkpoints hold all.",
        Averages,
    ),
    Idiom(
        "weights read after `super().optimizer_step(...)`, in `on_train_batch_start` or `on_before_zero_grad`",
        NO,
        "**One update old there**: `after_own_update(callback)`, or `strategy.drain()` first.",
    ),
    Idiom(
        "a penalty on `self.parameters()` in the step",
        NO,
        "The last stage has only its own: `add_auxiliary_loss` in the layers, or weight decay.",
    ),
    Idiom(
        "`loss.backward()` in `training_step`",
        NO,
        "The pipeline runs the backward, on all stages: leave it out.",
    ),
    Idiom(
        "`torch.autograd.grad(..., batch)` in the step",
        NO,
        "Input and loss are on different stages: within one layer.",
    ),
    Idiom(
        "`self.backbone` and `self.head`, called one by one in the step, no `self.model`",
        REFUSED,
        "Call both in `forward`, and `self(...)` in the step; or put both into `self.model`.",
        Backbone,
        says="has no self.model",
    ),
    Idiom(
        "`accumulate_grad_batches=2`",
        NOTE,
        "What steps log is averaged over the batches that share an update.",
        trainer={"accumulate_grad_batches": 2},
    ),
    Idiom("`gradient_clip_val=0.1`", WORKS, "Over all stages.", trainer={"gradient_clip_val": 0.1}),
    Idiom(
        '`gradient_clip_algorithm="value"`',
        WORKS,
        "",
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
]
