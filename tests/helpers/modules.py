"""LightningModules for the tests, each of which does something that a user's module may do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset
from torchmetrics import MeanSquaredError

from lightning_asyncpp import GPTModule, apply_layers
from lightning_asyncpp.models import GPTConfig
from tests.helpers.cases import DIM
from tests.helpers.projections import Changing
from tests.helpers.resumable import ResumableNet
from tests.helpers.trainer import Net, Run, Samples


class InPlace(nn.Module):
    """Layer that changes its input in place before using it, as memory-saving layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((DIM,), 0.1))
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return self.linear(nn.functional.relu(x, inplace=True))


class InPlaceNet(Net):
    """Module whose middle layers change their input in place, so that later stages can begin with such a layer."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), InPlace(), InPlace(), InPlace(), nn.Linear(DIM, 1))


class NoisyNet(Net):
    """Module that draws random numbers before and after its model."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
        return F.mse_loss(out * (1 + 0.1 * torch.rand(())), batch["y"])


class WeighingNet(Net):
    """Module that defines weights of its microbatches, which may be 0."""

    def microbatch_weight(self, batch: dict[str, Tensor]) -> float:
        return float((batch["y"] > 0).sum())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        keep = batch["y"] > 0
        return ((self.model(batch["x"]) - batch["y"]).square() * keep).sum() / keep.sum()


class SummingNet(Net):
    """Module whose step returns a sum; it logs the mean, and returns the mean to the oracle."""

    loss_reduction = "sum"

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        squares = (self.model(batch["x"]) - batch["y"]).square()
        self.log("train_loss", squares.mean(), on_step=True, on_epoch=True)
        return squares.sum() if self._trainer is not None else squares.mean()


def small_gpt(run: Run, **options: Any) -> GPTModule:
    config = GPTConfig(vocab_size=32, context_length=8, num_layers=3, dim=16, num_heads=2, mlp_dim=32, **options)
    return GPTModule(config, optimizer=run.make_optimizer, warmup_steps=2, total_steps=12)


class SumsAndExtremes(Net):
    """Module that logs with every kind of ``reduce_fx``."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        x = batch["x"]
        self.log("count", float(len(x)), reduce_fx="sum")
        self.log_dict({"highest": x.max()}, reduce_fx=torch.max)
        self.log("lowest", x.min(), reduce_fx="min")
        self.log("mean", x.mean(), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class MetricNet(Net):
    """Module that logs torchmetrics objects."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.train_mse, self.other_mse, self.val_mse = MeanSquaredError(), MeanSquaredError(), MeanSquaredError()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model(batch["x"])
        self.train_mse(out, batch["y"])
        self.log("train_mse", self.train_mse, on_step=False, on_epoch=True)
        self.other_mse.update(out, batch["y"])
        self.log("by_attribute", self.other_mse, on_step=False, on_epoch=True)
        return F.mse_loss(out, batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.model(batch["x"])
        self.val_mse(out, batch["y"])
        self.log("val_mse", self.val_mse)
        self.log("val_loss", F.mse_loss(out, batch["y"]))


class BatchNormNet(Net):
    """Module with buffers that its forward changes; those of the first layer depend on the batches alone."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(4)
        self.model = nn.Sequential(
            nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM),
            nn.Linear(DIM, 1),
        )  # fmt: skip


class Recomputed(nn.Module):
    """Layer that is recomputed in the backward; its BatchNorm is frozen, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM).eval()
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.norm(self.linear(x)).tanh(), x, use_reentrant=False)


class FrozenStatisticsNet(Net):
    """Module whose BatchNorm layers stay in evaluation mode throughout training."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(4)
        self.model = nn.Sequential(Recomputed(), Recomputed(), nn.Dropout(0.2), Recomputed(), nn.Linear(DIM, 1))


class LogsAtTheEnd(L.Callback):
    """Callback that logs, after every batch, a value that improves in the first three batches only."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("late", torch.tensor(float(max(3 - trainer.global_step, 0))))


class BackboneNet(Net):
    """Module with a backbone, for callbacks that unfreeze one."""

    @property
    def backbone(self) -> nn.Module:
        return self.model[0]  # type: ignore[index]


class Embeds(nn.Module):
    """First layer, which takes a mask as a keyword argument and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, keep: Tensor, times: int) -> dict[str, Any]:
        return {"h": self.linear(x), "keep": keep, "order": (torch.arange(len(x)), None), "times": times}


class Carries(nn.Module):
    """Layer that changes one entry of the dictionary that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, carried: dict[str, Any]) -> dict[str, Any]:
        order, nothing = carried["order"]
        assert nothing is None
        h = self.linear(carried["h"]).tanh() * carried["times"] + order.unsqueeze(1) * 0.01
        return {**carried, "h": h.masked_fill(~carried["keep"], 0.0)}


class Carrying(nn.Module):
    """Stand-in for a third-party model, cut by ``pipeline_layers()`` alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = Embeds()
        self.blocks = nn.ModuleList(Carries() for _ in range(3))
        self.head = nn.Linear(DIM, 1)

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, (self.head, lambda head, carried: head(carried["h"]))]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return apply_layers(self, *args, **kwargs)


class CarryingNet(Net):
    """Module whose stages send dictionaries with a mask, positions, ``None`` and a number."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = Carrying()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.model(batch["x"], keep=batch["x"] > -1, times=2), batch["y"])


class Begin(nn.Module):
    """First layer, with a parameter that its model also holds, and a matrix that three modules share."""

    def __init__(self, scale: nn.Parameter, shared: nn.Linear) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(DIM, DIM)
        self.linear.weight = shared.weight
        self.register_buffer("offset", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale + self.offset)


class End(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class Second(nn.Module):
    """Model that also holds parameters, buffers and modules of its layers; the function of a layer uses one."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        self.fixed = nn.Parameter(torch.rand(DIM), requires_grad=False)
        self.shared = nn.Linear(DIM, DIM, bias=False)
        self.begin = Begin(self.scale, self.shared)
        self.register_buffer("offset", self.begin.offset)
        middle = [nn.Sequential(nn.Linear(DIM, DIM), norm(DIM), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList(middle)
        self.blocks[1].fixed = self.fixed
        self.statistics = middle[0][1]
        self.favourite = middle[1]
        self.end = End(self.shared.weight)
        self.head = nn.Linear(DIM, 1)

    def pipeline_layers(self) -> list[Any]:
        return [self.begin, *self.blocks, (self.end, lambda end, x: end(x) + self.shared(x)), self.head]

    def forward(self, x: Tensor) -> Tensor:
        return apply_layers(self, x)


class SecondNet(Net):
    train_dataloader = ResumableNet.train_dataloader

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = Second()
        if run.options.get("weight_dtype"):  # on a CPU, torch's BatchNorm does not support mixed dtypes
            self.model = Second(nn.LayerNorm)
        self.head_weight = self.model.head.weight
        self.twin = self.model


SECOND_NAMES_RUN = Run(
    SecondNet, "async", {"microbatches": 4}, optimizer="muon", error_feedback=True,
    trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "enable_checkpointing": True}, samples=32,
)  # fmt: skip
EMA = ((EMAWeightAveraging, {"decay": 0.6}),)


class HasAverage(Changing):
    """Module that keeps a moving average of its network in torch's ``AveragedModel``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=True)

    def change(self, batch_idx: int) -> None:
        self.ema.update_parameters(self.model)


class Stream(IterableDataset):
    """Dataset of samples that has no length."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.samples = Samples(count, seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))
