"""Idioms of the pages on the LightningModule: what steps and hooks do, compute and log."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from tests.helpers.cases import DIM
from tests.helpers.modules import FrozenStatisticsNet, NoisyNet
from tests.helpers.trainer import Net, Run
from tests.trainer.idioms import NO, NOTE, REFUSED, WORKS, Idiom


class CallsItself(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch["x"]), batch["y"])


class ReturnsMore(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "targets": batch["y"]}


class SkipsTheBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class EndsTheEpoch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Distils(Net):
    """From a copy of the model, which stays whole: the last stage runs it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.teacher(batch["x"])
        return F.mse_loss(self.model(batch["x"]), batch["y"] + 2 * target + 1)


class FrozenExtractor(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.extractor = nn.Linear(DIM, DIM).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.extractor.eval()
        with torch.no_grad():
            features = self.extractor(batch["x"])
        return F.mse_loss(self.model(features), batch["y"])


class OutsideParameter(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.temperature = nn.Parameter(torch.ones(()))


class Buffered(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.register_buffer("scale", torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.model(batch["x"] * self.scale), batch["y"])


class TrainsInEvaluationMode(Net):
    def on_train_epoch_start(self) -> None:
        self.model.eval()


class Contrasts(Net):
    """Of all pairs of the batch a microbatch has fewer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.model(batch["x"])
        return F.cross_entropy(-torch.cdist(z, batch["y"]), torch.arange(len(z)))


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


class LogsAll(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss.detach(), on_epoch=True, on_step=False, reduce_fx="max")
        self.log("synced", loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
        self.log_dict({"a": loss.detach(), "b": 2 * loss.detach()}, on_epoch=True, on_step=False)
        return loss


class LogsTheLargest(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("largest", F.mse_loss(self.model(batch["x"]), batch["y"]), reduce_fx="max")


class Measures(Net):
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
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.is_global_zero:
            self.print("epoch", self.current_epoch, self.global_step, self.device, self.trainer.max_epochs)
        return super().training_step(batch, batch_idx)


class SamplesInAHook(Net):
    def on_train_epoch_end(self) -> None:
        self.model(torch.zeros(2, DIM))


class SavesMore(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"epoch": self.current_epoch}


class StopsItself(Net):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.should_stop = True


IDIOMS = [
    Idiom("`self(x)` with `forward` calling `self.model(x)`", WORKS, "", CallsItself),
    Idiom('`return {"loss": loss, ...}`', WORKS, "", ReturnsMore),
    Idiom("`return None` in `training_step`", REFUSED,
          "Return a loss of 0: it leaves weights as they are, except for momentum and decay.", SkipsTheBatch,
          says="without calling self.model", processes=True),
    Idiom("`return -1` in `on_train_batch_start`", WORKS, "", EndsTheEpoch, metrics=False, processes=True),
    Idiom("random numbers in the step (mixup)", NOTE,
          "Drawn for each microbatch, the same on all stages, from the seed of the run. From torch's generators: "
          "Python's and numpy's differ from stage to stage.", NoisyNet),
    Idiom("a frozen teacher in the step", WORKS, "", Distils, processes=True),
    Idiom("a frozen feature extractor before `self.model`", WORKS, "", FrozenExtractor),
    Idiom("a trained parameter beside `self.model`", REFUSED, "Move it into a layer.", OutsideParameter,
          says="outside the layers"),
    Idiom("`register_buffer` on the LightningModule", NOTE,
          "Where steps only read it. What a step writes after `self.model(...)` and the next one reads before it "
          "differs between stages.", Buffered),
    Idiom("`torch.autocast(...)`, `sdpa_kernel(...)` or `torch.no_grad()` around `self.model(...)`", NO,
          "It does not reach layers of other stages: `precision=` of the Trainer, or inside the layers."),
    Idiom("`self.model.eval()` in a step", NO,
          "It holds on the first and the last stage only: use `on_train_epoch_start`."),
    Idiom("`self.model.eval()` in `on_train_epoch_start`", WORKS, "", TrainsInEvaluationMode),
    Idiom("a forward hook and a full backward hook of a layer, with a queue between them", NOTE,
          "Not with an attribute: other forwards run between a microbatch's forward and its backward.", PairsHooks),
    Idiom("`torch.utils.checkpoint.checkpoint(...)` in a layer", WORKS, "", FrozenStatisticsNet),
    Idiom("a loss over all pairs of the batch (contrastive)", NOTE,
          "Pairs within a microbatch: `asyncpp check` says both losses.", Contrasts),
    Idiom("`self.log(..., on_step, on_epoch, prog_bar, reduce_fx, sync_dist)`, `self.log_dict`", WORKS, "", LogsAll,
          processes=True),
    Idiom('`self.log(..., reduce_fx="max")` in `validation_step`', NOTE, "Of microbatches.", LogsTheLargest),
    Idiom("`torchmetrics`, `MetricCollection`", WORKS, "", Measures, processes=True),
    Idiom("collected outputs in `on_validation_epoch_end`", NOTE,
          "Only on the last stage, one per microbatch: return early on others.", Collects, metrics=False,
          processes=True),
    Idiom("`self.all_gather(...)` there", NO,
          "It is over all ranks, so every rank must call it; what `self.log` logs there on rank 0 counts for all."),
    Idiom("`if self.trainer.is_global_zero:`, `self.print`, `self.current_epoch`", WORKS, "", LogsOnRankZero),
    Idiom("`self.model(...)` in a hook", REFUSED, "`strategy.evaluation_step(...)` in a callback.", SamplesInAHook,
          says="must be Tensor, not NoneType", processes=True),
    Idiom("`on_save_checkpoint`", WORKS, "", SavesMore, {"enable_checkpointing": True}, processes=True),
    Idiom("`self.trainer.should_stop = True` at an epoch's end", WORKS, "", StopsItself, {"max_epochs": 4}),
    Idiom("`torch.autograd.grad(loss, self.parameters())` in the step", NO,
          "A stage has only its own layers: within one layer."),
]  # fmt: skip
