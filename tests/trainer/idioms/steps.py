"""Idioms of the pages on the LightningModule: what its steps and hooks do, compute and log."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from tests.helpers.cases import DIM
from tests.helpers.modules import FrozenStatisticsNet, NoisyNet
from tests.helpers.trainer import Net, Run
from tests.trainer.idioms import Idiom


class SkipsTheBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class OutsideParameter(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.temperature = nn.Parameter(torch.ones(()))


class Contrasts(Net):
    """Model with a loss over all pairs of a batch; a microbatch has fewer pairs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.model(batch["x"])
        return F.cross_entropy(-torch.cdist(z, batch["y"]), torch.arange(len(z)))


class PairsHooks(Net):
    """Model whose layers scale gradients by activations, with a queue between forward and backward hooks."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        for layer in self.model.children():
            layer.queue = deque()
            layer.register_forward_hook(lambda at, _, out: at.queue.append(out.detach()) if at.training else None)
            layer.register_full_backward_hook(scale_by_activation)


def scale_by_activation(layer: Any, gradients: Any, _: Any) -> Any:
    scale = 1 / (1 + layer.queue.popleft().abs().mean())
    return tuple(None if gradient is None else gradient * scale for gradient in gradients)


class Ordinary(Net):
    """Model that combines common idioms: networks beside the model, buffers, metrics, logged values of all kinds."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.extractor = nn.Linear(DIM, DIM).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.error = MeanAbsoluteError()
        self.val_errors = MetricCollection([MeanAbsoluteError(), MeanSquaredError()], prefix="val_")

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.extractor.eval()
        with torch.no_grad():
            batch["y"] += 2 * self.teacher(batch["x"]) + 1
            features = self.extractor(batch["x"].mul_(self.scale))
        predicted = self(features)
        loss = F.mse_loss(predicted, batch["y"])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss.detach(), on_epoch=True, on_step=False, reduce_fx="max")
        self.log("synced", loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
        self.log_dict({"a": loss.detach(), "b": 2 * loss.detach()}, on_epoch=True, on_step=False)
        self.error(predicted, batch["y"])
        self.log("error", self.error, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            self.print("epoch", self.current_epoch, self.global_step, self.device, self.trainer.max_epochs)
        return {"loss": loss, "targets": batch["y"]}

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        predicted = self.model(batch["x"])
        self.log("val_largest", F.mse_loss(predicted, batch["y"]), reduce_fx="max")
        self.val_errors.update(predicted, batch["y"])
        self.log_dict(self.val_errors)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"epoch": self.current_epoch}

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.should_stop = True


class EndsTheEpoch(Net):
    """Model that trains in evaluation mode, ends epochs early, and collects the outputs of its validation."""

    def __init__(self, run: Run) -> None:
        super().__init__(replace(run, dropout=0.3))
        self.outputs: list[Tensor] = []

    def on_train_epoch_start(self) -> None:
        self.model.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.outputs.append(F.mse_loss(self.model(batch["x"]), batch["y"]))

    def on_validation_epoch_end(self) -> None:
        if self.outputs:
            self.log("val_mean", torch.stack(self.outputs).mean())
            self.outputs.clear()


class SamplesInAHook(Net):
    def on_train_epoch_end(self) -> None:
        self.model(torch.zeros(2, DIM))


IDIOMS = [
    Idiom(
        'self(x) | return { | frozen teacher | frozen feature | in place | register_buffer | sync_dist | "max")`'
        " | torchmetrics | is_global_zero | on_save_checkpoint | should_stop",
        Ordinary, {"enable_checkpointing": True, "max_epochs": 4}, processes=True,
    ),
    Idiom("return None` in", SkipsTheBatch, says="without calling self.model", processes=True),
    Idiom("return -1 | eval()` in `on | collected", EndsTheEpoch, metrics=False, processes=True),
    Idiom("mixup", NoisyNet),
    Idiom("parameter beside", OutsideParameter, says="outside the layers"),
    Idiom("a queue between", PairsHooks),
    Idiom("checkpoint.checkpoint", FrozenStatisticsNet),
    Idiom("contrastive", Contrasts),
    Idiom("self.model(...)` in a hook", SamplesInAHook, says="must be Tensor, not NoneType", processes=True),
]  # fmt: skip
