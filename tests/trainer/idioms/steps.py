"""Idioms of the pages on the LightningModule: what steps and hooks do, compute and log."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from tests.helpers.cases import DIM
from tests.helpers.trainer import Net, Run
from tests.trainer.idioms.entry import NO, NOTE, REFUSED, WORKS, Idiom


class CallsItself(Net):
    """``self(x)`` in the steps."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch["x"]), batch["y"])


class ReturnsMore(Net):
    """A dictionary with more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.model(batch["x"])
        return {"loss": F.mse_loss(predicted, batch["y"]), "predicted": predicted.detach()}


class SkipsTheBatch(Net):
    """A batch that is skipped by returning nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class EndsTheEpoch(Net):
    """An epoch that ends early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Mixes(Net):
    """Random numbers and the input's random mixture in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = torch.rand(len(batch["x"]), 1)
        x, y = (weight * t + (1 - weight) * t.flip(0) for t in (batch["x"], batch["y"]))
        return F.mse_loss(self.model(x), y)


class Distils(Net):
    """A frozen teacher beside the model."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.teacher = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 1)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.teacher(batch["x"])
        return F.mse_loss(self.model(batch["x"]), batch["y"] + target)


class FrozenExtractor(Net):
    """A frozen feature extractor in front of the model."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.extractor = nn.Linear(DIM, DIM).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.extractor.eval()
        with torch.no_grad():
            features = self.extractor(batch["x"])
        return F.mse_loss(self.model(features), batch["y"])


class OutsideParameter(Net):
    """A trained parameter beside the model."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.temperature = nn.Parameter(torch.ones(()))


class Buffered(Net):
    """A buffer of the module, used in its step."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.register_buffer("scale", torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.model(batch["x"] * self.scale), batch["y"])


class TrainsInEvaluationMode(Net):
    """Layers that are kept in evaluation mode from a hook on."""

    def on_train_epoch_start(self) -> None:
        self.model.eval()


class Checkpointed(nn.Module):
    """Recomputes its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Recomputes(Net):
    """Activation checkpointing in the layers."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(Checkpointed(), Checkpointed(), Checkpointed(), nn.Linear(DIM, 1))


class Contrasts(Net):
    """A loss over all pairs of the batch, of which a microbatch has fewer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.model(batch["x"])
        return F.cross_entropy(-torch.cdist(z, batch["y"]), torch.arange(len(z)))


class LogsAll(Net):
    """The arguments of ``self.log``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss.detach(), on_epoch=True, on_step=False, reduce_fx="max")
        self.log("synced", loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
        self.log_dict({"a": loss.detach(), "b": 2 * loss.detach()}, on_epoch=True, on_step=False)
        return loss


class PairsHooks(Net):
    """Scales gradients by activations."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        for layer in self.model.children():
            layer.queue = deque()
            layer.register_forward_hook(lambda at, _, out: at.queue.append(out.detach()) if at.training else None)
            layer.register_full_backward_hook(scale_by_activation)


def scale_by_activation(layer: Any, gradients: Any, _: Any) -> Any:
    scale = 1 / (1 + layer.queue.popleft().abs().mean())
    return tuple(None if gradient is None else gradient * scale for gradient in gradients)


class LogsTheLargest(Net):
    """The largest loss of an evaluation, which depends on how its batches are cut."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("largest", F.mse_loss(self.model(batch["x"]), batch["y"]), reduce_fx="max")


class Measures(Net):
    """Metrics of torchmetrics, a collection among them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.error = MeanAbsoluteError()
        self.val_errors = MetricCollection([MeanAbsoluteError(), MeanSquaredError()], prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.model(batch["x"])
        self.error(predicted, batch["y"])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return F.mse_loss(predicted, batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.val_errors.update(self.model(batch["x"]), batch["y"])
        self.log_dict(self.val_errors)


class Collects(Net):
    """What steps collect, stacked at the end of the epoch."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.outputs.append(F.mse_loss(self.model(batch["x"]), batch["y"]))

    def on_validation_epoch_end(self) -> None:
        if self.outputs:
            self.log("val_mean", torch.stack(self.outputs).mean())
            self.outputs.clear()


class LogsOnRankZero(Net):
    """What only rank 0 does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.is_global_zero:
            self.print("epoch", self.current_epoch, self.global_step, self.device, self.trainer.max_epochs)
        return super().training_step(batch, batch_idx)


class SamplesInAHook(Net):
    """The model called in a hook."""

    def on_train_epoch_end(self) -> None:
        self.model(torch.zeros(2, DIM))


class SavesMore(Net):
    """More in the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"epoch": self.current_epoch}


class StopsItself(Net):
    """A module that ends the training."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.should_stop = True


IDIOMS = [
    Idiom("`self(x)` with `forward` calling `self.model(x)`", WORKS, "", CallsItself),
    Idiom('`return {"loss": loss, ...}`', WORKS, "", ReturnsMore),
    Idiom(
        "`return None` in `training_step`",
        REFUSED,
        "Return a loss of 0: it leaves weights as they are, except for momentum and decay.",
        SkipsTheBatch,
        says="without calling self.model",
    ),
    Idiom("`return -1` in `on_train_batch_start`", WORKS, "", EndsTheEpoch, metrics=False),
    Idiom(
        "random numbers in the step (mixup)",
        NOTE,
        "Drawn for each microbatch, the same on all stages, from the seed of the run. From torch's generators: "
        "Python's and numpy's differ from stage to stage.",
        Mixes,
    ),
    Idiom("a frozen teacher in the step", WORKS, "", Distils),
    Idiom("a frozen feature extractor before `self.model`", WORKS, "", FrozenExtractor),
    Idiom(
        "a trained parameter beside `self.model`",
        REFUSED,
        "Move it into a layer.",
        OutsideParameter,
        says="outside the layers",
    ),
    Idiom(
        "`register_buffer` on the LightningModule",
        NOTE,
        "Where steps only read it. What a step writes after `self.model(...)` and the next one reads before it differs"
        " between stages.",
        Buffered,
    ),
    Idiom(
        "`torch.autocast(...)`, `sdpa_kernel(...)` or `torch.no_grad()` around `self.model(...)`",
        NO,
        "It does not reach layers of other stages: `precision=` of the Trainer, or inside the layers.",
    ),
    Idiom(
        "`self.model.eval()` in a step",
        NO,
        "It holds on the first and the last stage only: use `on_train_epoch_start`.",
    ),
    Idiom("`self.model.eval()` in `on_train_epoch_start`", WORKS, "", TrainsInEvaluationMode),
    Idiom(
        "a forward hook and a full backward hook of a layer, with a queue between them",
        NOTE,
        "Not with an attribute: other forwards run between a microbatch's forward and its backward.",
        PairsHooks,
    ),
    Idiom("`torch.utils.checkpoint.checkpoint(...)` in a layer", WORKS, "", Recomputes),
    Idiom(
        "a loss over all pairs of the batch (contrastive)",
        NOTE,
        "Pairs within a microbatch: `asyncpp check` says both losses.",
        Contrasts,
    ),
    Idiom("`self.log(..., on_step, on_epoch, prog_bar, reduce_fx, sync_dist)`, `self.log_dict`", WORKS, "", LogsAll),
    Idiom(
        '`self.log(..., reduce_fx="max")` in `validation_step`',
        NOTE,
        "Of microbatches.",
        LogsTheLargest,
    ),
    Idiom("`torchmetrics`, `MetricCollection`", WORKS, "", Measures),
    Idiom(
        "collected outputs in `on_validation_epoch_end`",
        NOTE,
        "Only on the last stage, one per microbatch: return early on others.",
        Collects,
        metrics=False,
    ),
    Idiom(
        "`self.all_gather(...)` there",
        NO,
        "It is over all ranks, so every rank must call it; what `self.log` logs there on rank 0 counts for all.",
    ),
    Idiom("`if self.trainer.is_global_zero:`, `self.print`, `self.current_epoch`", WORKS, "", LogsOnRankZero),
    Idiom(
        "`self.model(...)` in a hook",
        REFUSED,
        "`strategy.evaluation_step(...)` in a callback.",
        SamplesInAHook,
        says="must be Tensor, not NoneType",
    ),
    Idiom("`on_save_checkpoint`", WORKS, "", SavesMore),
    Idiom("`self.trainer.should_stop = True` at an epoch's end", WORKS, "", StopsItself, epochs=4),
    Idiom(
        "`torch.autograd.grad(loss, self.parameters())` in the step",
        NO,
        "A stage has only its own layers: within one layer.",
    ),
]
