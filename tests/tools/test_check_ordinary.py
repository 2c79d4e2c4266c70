"""check_model finds nothing in ordinary modules: no false alarm."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp import check_model
from lightning_asyncpp.optim import SOAP, ErrorFeedback, MuonAdamW, NorMuonAdamW

DIM, WORDS = 8, 32
Optimizers = Callable[[Any], Any]


def batches(size: int = 8, channels: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (size, channels, 32, 32) if channels else (size, DIM)
    return [(torch.randn(shape, generator=generator), torch.randint(4, (size,), generator=generator)) for _ in range(3)]


def texts(time: int = 9) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(WORDS, (8, time), generator=generator) for _ in range(3)]


class Net(L.LightningModule):
    """A classifier, or a language model where a batch is a tensor."""

    def __init__(self, make: Callable[[], nn.Module] | None = None, optimizer: Optimizers | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model: Any = mlp() if make is None else make()
        self.optimizer = optimizer or functools.partial(torch.optim.AdamW, lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Tensor):
            logits = self.model(batch[:, :-1])
            logits = logits if isinstance(logits, Tensor) else logits.logits
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def mlp(*inner: nn.Module) -> nn.Sequential:
    inner = inner or (nn.ReLU(),)
    return nn.Sequential(nn.Linear(DIM, 16), *inner, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


def group_norm() -> nn.Module:
    blocks = [Residual(8) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(DIM, 16), nn.Linear(16, 32)])
        self.middle = nn.Linear(32, 32)
        self.up = nn.ModuleList([nn.Linear(64, 16), nn.Linear(32, 4)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1))
        return x


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class Diffusion(Net):
    """Draws a time and noise for every sample."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(DIM, 16), nn.SiLU(), nn.Linear(16, 16), nn.Linear(16, DIM)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise, time = torch.randn_like(batch[0]), torch.rand(len(batch[0]), 1)
        return F.mse_loss(self.model(time * batch[0] + (1 - time) * noise), noise)


class Draws(Net):
    """Augments with NumPy and Python before the call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * float(np.random.uniform(0.5, 1.5)) + random.gauss(0.0, 0.1)
        return F.cross_entropy(self.model(x), batch[1])


class Distills(Net):
    """Has a frozen teacher beside the network, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        teacher = self.teacher(batch[0]).softmax(1)
        logits = self.model(batch[0])
        self.log("entropy", -(teacher * teacher.log()).sum(1).mean())
        return {"loss": F.cross_entropy(logits, teacher), "logits": logits.detach()}


class Hooked(Net):
    """Looks at gradients and repairs them, counts, and limits weights after an update."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.nan_to_num_()
            p.grad.mul_(0.9**self.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        self.updates += 1
        with torch.no_grad():
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    layer.weight.clamp_(-0.3, 0.3)


class Masked(Net):
    """Has padding, which does not count."""

    def microbatch_weight(self, microbatch: Any) -> float:
        return float((microbatch[1] != 0).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], ignore_index=0)


class Rates(Net):
    """A rate for each parameter, by its place, with warmup."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([{"params": [p], "lr": 0.01 * 0.8**i} for i, p in enumerate(self.parameters())])
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Averages(Net):
    """torch's average of the network, kept by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.model)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.model.parameters())


class Schedules(Net):
    """One cycle, as long as the Trainer says; accumulates twice."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def of_library(name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: make(pytest.importorskip(name))


def of_transformers(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    common = {"vocab_size": WORDS, "use_cache": False}
    return of_library("transformers", lambda t: getattr(t, model)(getattr(t, config)(**common, **options)))


def with_adapters() -> nn.Module:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(LLAMA(), adapters)
    return model


def optimizer_of_library(name: str, **options: Any) -> Optimizers:
    return lambda p: getattr(pytest.importorskip("pytorch_optimizer"), name)(p, lr=1e-3, **options)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LLAMA = of_transformers("LlamaConfig", "LlamaForCausalLM", attention_dropout=0.1, **SMALL)
GPT2 = of_transformers("GPT2Config", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2)
EXPERTS = {"num_local_experts": 2, "num_key_value_heads": 1}
MIXTRAL = of_transformers("MixtralConfig", "MixtralForCausalLM", **SMALL, **EXPERTS)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
Case = tuple[Callable[[], Any], list[Any], dict[str, Any]]

FAST: dict[str, Case] = {
    "SGD, clipped": (lambda: Net(optimizer=SGD), batches(), {"gradient_clip_val": 0.1}),
    "hooks around an update": (Hooked, batches(), {}),
    "NumPy and Python draw": (Draws, batches(), {}),
    "average of weights": (Net, batches(), {"callbacks": [EMAWeightAveraging(decay=0.9)]}),
    "steps counted in a group": (lambda: Net(optimizer=optimizer_of_library("Lion")), batches(), {}),
    "U-Net": (lambda: Net(UNet), batches(), {"stages": 3}),
    "padding": (Masked, batches(), {}),
    "unequal pieces": (Net, batches(7), {"microbatches": 3}),
    "Llama": (lambda: Net(LLAMA), texts(), {"gradient_clip_val": 1.0}),
}  # fmt: skip
SLOW: dict[str, Case] = {
    "norms after a bias": (lambda: Net(lambda: mlp(nn.LayerNorm(16), nn.GELU())), batches(), {}),
    "GroupNorm": (lambda: Net(group_norm), batches(channels=3), {}),
    "frozen BatchNorm": (lambda: Net(lambda: mlp(nn.BatchNorm1d(16).eval())), batches(), {}),
    "BatchNorm": (lambda: Net(lambda: mlp(nn.BatchNorm1d(16))), batches(16), {}),
    "dropout, three stages": (lambda: Net(lambda: mlp(nn.Dropout(0.3))), batches(), {"stages": 3, "slack": "exact"}),
    "TransformerEncoder": (lambda: Net(Encoder), texts(), {"gradient_clip_val": 0.5}),
    "GRU": (lambda: Net(Recurrent), texts(), {}),
    "diffusion": (Diffusion, batches(), {}),
    "distillation": (Distills, batches(), {}),
    "rates by place": (Rates, batches(), {}),
    "AveragedModel": (Averages, batches(), {}),
    "one cycle, accumulated": (Schedules, batches(), {"accumulate_grad_batches": 2}),
    "bf16": (lambda: Net(Encoder), texts(), {"precision": "bf16-true"}),
    "Muon": (lambda: Net(optimizer=MuonOf(MuonAdamW)), batches(), {"delay": 0}),
    "NorMuon with Error Feedback": (lambda: Net(optimizer=MuonOf(NorMuonAdamW, True)), batches(), {}),
    "SOAP": (lambda: Net(optimizer=functools.partial(SOAP, lr=0.01)), batches(), {}),
    "schedule-free": (lambda: Net(optimizer=optimizer_of_library("ScheduleFreeAdamW")), batches(), {}),
    "LAMB": (lambda: Net(optimizer=optimizer_of_library("Lamb", max_grad_norm=0.0)), batches(), {}),
    "Llama with LoRA": (lambda: Net(with_adapters), texts(), {}),
    "GPT-2, dropout": (lambda: Net(GPT2), texts(), {}),
    "BERT": (lambda: Net(of_transformers("BertConfig", "BertForMaskedLM", **SMALL)), texts(), {}),
    "Mixtral": (lambda: Net(MIXTRAL), texts(), {}),
    "ViT of torchvision": (lambda: Net(of_library("torchvision", vision_transformer)), batches(channels=3), {}),
    "ResNet of torchvision": (lambda: Net(of_library("torchvision", resnet)), batches(channels=3), {"updates": 2}),
}  # fmt: skip


class MuonOf:
    """Makes an optimizer that goes by names."""

    def __init__(self, cls: Any, corrected: bool = False) -> None:
        self._base = functools.partial(cls, lr=0.01)
        self._corrected = corrected

    def __call__(self, parameters: Any) -> Any:
        return ErrorFeedback(parameters, self._base) if self._corrected else self._base(parameters)


def vision_transformer(torchvision: Any) -> nn.Module:
    make = importlib.import_module("torchvision.models.vision_transformer").VisionTransformer
    model: nn.Module = make(32, 16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4)
    return model


def resnet(torchvision: Any) -> nn.Module:
    model: nn.Module = torchvision.models.resnet18(num_classes=4)
    return model


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_an_ordinary_module_is_equal(name: str) -> None:
    make, data, options = {**FAST, **SLOW}[name]
    report = check_model(make(), data, **{"updates": 3, **options})
    assert report.ok, str(report)
