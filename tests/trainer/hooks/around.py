"""Modules whose steps set something around ``self.model(...)``, change the model, or take gradients by themselves."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.core.cases import DIM
from tests.trainer.hooks.crossing import Codes, TooWide
from tests.trainer.runs import Net, Run

HEADS = 2


class Attends(nn.Module):
    """Attention within a sample; a part is recomputed in the backward, under autocast as in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(DIM, 3 * 3 * DIM * HEADS), nn.Linear(3 * DIM * HEADS, DIM)

    def forward(self, x: Tensor) -> Tensor:
        projected = checkpoint(self.project, x, use_reentrant=False)
        q, k, v = projected.view(len(x), HEADS, 3, 3 * DIM).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).reshape(len(x), 3 * DIM * HEADS))


class SetsAll(Net):
    """Autocast in some micro-batches, one backend of attention in all of them; in evaluations both everywhere."""

    backend = SDPBackend.MATH

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(Attends(), nn.Tanh(), Attends(), nn.Tanh(), Attends(), nn.Linear(DIM, 1))

    def predicted(self, batch: dict[str, Tensor], enabled: bool = True) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), sdpa_kernel(self.backend):
            return self.model(batch["x"]).float()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return F.mse_loss(self.predicted(batch, bool(batch["x"][0, 0] > 0)), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.predicted(batch), batch["y"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.predicted(batch)


class Prefers(nn.Module):
    """As torch itself on some GPUs: the first that computes attention puts another backend in front, for good."""

    def forward(self, x: Tensor) -> Tensor:
        torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
        return x


class LayersSetForGood(Net):
    """What layers change in the process is nothing that the step sets around them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), Prefers(), nn.Linear(DIM, DIM), Prefers(), nn.Linear(DIM, 1))
        self.order = torch._C._get_sdp_priority_order()
        assert self.order != [0, 1, 2, 3, 4]

    def on_fit_end(self) -> None:
        torch._C._set_sdp_priority_order(self.order)


class InFullPrecision(Net):
    """Leaves the precision of the Trainer around the model."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(self.model(batch["x"]), batch["y"])


class Penalises(Net):
    """The gradient of a loss with respect to the model's output is there on the last stage."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        out = self.model(batch["x"])
        (gradient,) = torch.autograd.grad(F.mse_loss(out, batch["y"], reduction="sum"), out, create_graph=True)
        return gradient.pow(2).mean()


class Around(Net):
    """What a step does before it calls the model, or around it."""

    def call(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return F.mse_loss(self.call(batch["x"]), batch["y"])


class NoGrad(Around):
    def call(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(x)


class Device(Around):
    def call(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return self.model(x)


class SavesOnCPU(Around):
    def call(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.model(x)


class PrefersAttention(Around):
    def call(self, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return self.model(x)


class SwitchesAttention(Around):
    def call(self, x: Tensor) -> Tensor:
        torch.backends.cuda.enable_flash_sdp(False)
        return self.model(x)


class Caches(Around):
    def call(self, x: Tensor) -> Tensor:
        with torch.nn.utils.parametrize.cached():
            return self.model(x)


class WithoutOneDNN(Around):
    def call(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return self.model(x)


class Differentiates(Around):
    def call(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.model)(x)


class FreezesALayer(Around):
    """Statistics of a layer in the middle are to stay."""

    def call(self, x: Tensor) -> Tensor:
        self.model[4].eval()  # type: ignore[index]
        return self.model(x)


class FreezesWeights(Around):
    def call(self, x: Tensor) -> Tensor:
        self.model[0].requires_grad_(False)  # type: ignore[index]
        return self.model(x)


class OtherWeights(Around):
    """Only layers of one stage are given other weights."""

    layer = "0"

    def call(self, x: Tensor) -> Tensor:
        names = [name for name, _ in self.model.named_parameters() if name.startswith(self.layer)]
        weights = {name: torch.zeros(DIM, DIM) for name in names or [f"{self.layer}.weight"] if "weight" in name}
        return torch.func.functional_call(self.model, weights, (x,))


class OtherWeightsOfTheLast(OtherWeights):
    layer = "8"

    def call(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, {"8.weight": torch.zeros(1, DIM)}, (x,))


class SwapsValues(Around):
    """An averaged model's weights are copied in, as its helpers do."""

    def call(self, x: Tensor) -> Tensor:
        kept = [p.data.clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data.copy_(0.9 * p.data)
        out = self.model(x)
        for p, value in zip(self.model.parameters(), kept):
            p.data.copy_(value)
        return out


class SetsAnAttribute(Around):
    def call(self, x: Tensor) -> Tensor:
        self.model[4].scale = 0.5  # type: ignore[index]
        return self.model(x)


class SetsAnAttributeAfterwards(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.model[1].p = 0.5  # type: ignore[index]
        return loss


class SetsAttributesOfAllLayers(Around):
    """As recipes do that raise the rate of dropout, with the steps that were made."""

    def call(self, x: Tensor) -> Tensor:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.01 * self.global_step
        return self.model(x)


class SetsAnAttributeOfTheModel(Around):
    def call(self, x: Tensor) -> Tensor:
        self.model.temperature = 1.0 / (1 + self.global_step)  # type: ignore[assignment]
        return self.model(x)


class ChangesAConfiguration(Around):
    """One that the model and the module refer to."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.settings = {"temperature": 1.0}
        self.model.settings = self.settings  # type: ignore[assignment]

    def call(self, x: Tensor) -> Tensor:
        self.settings["temperature"] = 1.0 / (1 + self.global_step)
        return self.model(x)


class SetsAttributesWithTheBatch(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            for module in self.model.modules():
                module.temperature = 1.0 / (1 + self.global_step)  # type: ignore[assignment]
        return batch


class SetsAttributesAfterwards(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for module in self.model.modules():
            module.temperature = 0.9 * getattr(module, "temperature", 1.0)  # type: ignore[assignment]
        return loss


class SetsAttributesInAHook(Net):
    """Right: the hook runs on every stage."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.01 * self.global_step


class RunningMean(Net):
    """Kept after the call of the model, and used before the next one."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.register_buffer("mean", torch.ones(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self.model(batch["x"] * self.mean), batch["y"])
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


class Counter(RunningMean):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self.model(batch["x"] * (1 + self.calls)), batch["y"])
        self.calls += 1
        return loss


class CountsBefore(Counter):
    """Right: both stages count."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.calls += 1
        return F.mse_loss(self.model(batch["x"] * (1 + self.calls)), batch["y"])


class PythonsRandom(Net):
    """Draws before the model and after it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self.model(batch["x"] * random.random()), batch["y"])
        return loss * (1 + random.random())


class RequiresInputGradient(Around):
    def call(self, x: Tensor) -> Tensor:
        return self.model(x.requires_grad_(True))


class Backwards(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.backward(retain_graph=True)
        return loss


class TakesGradientsOfWeights(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, self.model.parameters(), create_graph=True, allow_unused=True)
        return loss + sum(g.square().sum() for g in gradients if g is not None)


class TakesGradientOfTheBatch(Net):
    """The batch needs a gradient only after the call."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        out = self.model(batch["x"])
        (gradient,) = torch.autograd.grad(out.sum(), batch["x"].requires_grad_(True), create_graph=True)
        return out.mean() + gradient.square().mean()


class TrainsInTheValidation(Net):
    """Dropout is on in a validation."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.model.train()
        super().validation_step(batch, batch_idx)


ALONE = "would hold on the last stage of the pipeline alone"
REFUSED: list[tuple[type[Net], str, int]] = [
    (NoGrad, "torch.no_grad(), inference_mode() or another switch of gradients: the step sets it", 2),
    (Device, "a TorchFunctionMode", 2),
    (SavesOnCPU, "hooks on saved tensors (save_on_cpu", 2),
    (PrefersAttention, "the order of attention backends", 2),
    (SwitchesAttention, "were switched in the step and left so", 2),
    (Caches, "parametrize.cached()", 2),
    (WithoutOneDNN, "flags of cuDNN or oneDNN", 2),
    (Differentiates, "a transform of torch.func", 2),
    (FreezesALayer, "train() or eval() on self.model, or on a part of it", 3),
    (FreezesWeights, "requires_grad_() on parameters of self.model in the step", 2),
    (OtherWeights, "other weights in self.model", 2),
    (OtherWeightsOfTheLast, "other weights in self.model", 3),
    (SwapsValues, "other weights in self.model", 2),
    (SetsAnAttribute, "self.model.4.scale was set in the step", 3),
    (SetsAnAttributeAfterwards, "self.model.1.p was set in the step", 2),
    (RequiresInputGradient, "the input lives on the first stage of the pipeline and the loss on the last", 3),
    (Backwards, "a backward through self.model in the step", 3),
    (TakesGradientsOfWeights, "torch.autograd.grad(..., parameters) in the step", 2),
    (TakesGradientOfTheBatch, "with respect to something that the loss does not depend on", 2),
]

REFUSED_LATER: list[tuple[type[Net], str, int]] = [
    (SetsAttributesOfAllLayers, "was set in the step, which not all stages run to its end", 3),
    (SetsAnAttributeOfTheModel, "self.model.temperature was set in the step, which not all stages run to its end", 3),
    (ChangesAConfiguration, "self.model.settings['temperature'] was set in the step", 3),
    (SetsAttributesWithTheBatch, "was set in a hook of the batch's transfer, which not all stages", 3),
    (SetsAttributesAfterwards, "temperature was set in the step", 2),
    (RunningMean, "the step calls self.model(...) with other arguments on the last stage than on the first", 2),
    (Counter, "the step calls self.model(...) with other arguments on the last stage", 3),
    (PythonsRandom, "the step calls self.model(...) with other arguments on the last stage", 2),
]
"""In the second micro-batch, or in the second batch: as soon as it makes a difference."""


REFUSED += [
    (TooWide, "layer '1' at a cut returned 801 tensors; at most 256 may cross a cut", 2),
    (Codes, "layer '1' returned a tensor of shape (4, 6), dtype torch.float8_e4m3fn", 2),
]
