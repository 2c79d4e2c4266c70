"""check_model finds nothing in ordinary modules: no false alarm."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import check_model

DIM, WORDS = 8, 32


def batches(size: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, 4, (size,), generator=generator)
    return [(torch.randn(size, DIM, generator=generator), draw()) for _ in range(3)]


def texts(time: int = 9) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(WORDS, (8, time), generator=generator) for _ in range(3)]


class Net(L.LightningModule):
    """A classifier, or a language model where a batch is a tensor."""

    def __init__(
        self, make: Callable[[], nn.Module] | None = None, optimizer: Callable[[Any], Any] | None = None
    ) -> None:
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


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


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


def schedule_free(parameters: Any) -> Any:
    return pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW(parameters, lr=1e-3)


def llama() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, attention_dropout=0.1, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


SLOW = pytest.mark.slow
CASES: list[Any] = [
    pytest.param(Hooked, batches(), {}, id="hooks-around-an-update"),
    pytest.param(lambda: Net(UNet), batches(), {"stages": 3}, id="unet", marks=SLOW),
    pytest.param(Masked, batches(), {}, id="padding", marks=SLOW),
    pytest.param(lambda: Net(llama), texts(), {"gradient_clip_val": 1.0}, id="llama"),
    pytest.param(Draws, batches(), {}, id="numpy-and-python-draw", marks=SLOW),
    pytest.param(lambda: Net(optimizer=schedule_free), batches(), {}, id="schedule-free", marks=SLOW),
    pytest.param(Diffusion, batches(), {}, id="diffusion", marks=SLOW),
]


@pytest.mark.parametrize(("make", "data", "options"), CASES)
def test_an_ordinary_module_is_equal(make: Callable[[], Any], data: list[Any], options: dict[str, Any]) -> None:
    report = check_model(make(), data, **{"updates": 3, **options})
    assert report.ok, str(report)
