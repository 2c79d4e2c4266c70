"""check_model finds no difference in modules that a pipeline trains right, and names what would differ in others."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp import GPTModule, after_own_update, check_model
from lightning_asyncpp.models import GPTConfig, MoEConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.tools.check import check
from tests.helpers.models import of_transformers, write_texts

DIM, CLASSES = 8, 4
AdamW = functools.partial(torch.optim.AdamW, lr=0.02)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(DIM, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(),
        nn.Linear(16, CLASSES),
    )  # fmt: skip


class Net(L.LightningModule):
    """Classifier with a given network and optimizer."""

    def __init__(self, model: nn.Module | None = None, optimizer: Callable[[Any], Any] = AdamW) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.optimizer = model or net(), optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def batches(size: int = 8, ignored: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        x, y = torch.randn(size, DIM, generator=generator), torch.randint(CLASSES, (size,), generator=generator)
        y[:ignored] = -100
        found.append({"x": x, "y": y})
    return found


def tokens(time: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(32, (8, time), generator=generator) for _ in range(3)]


class Scheduled(Net):
    """Module with two parameter groups and a schedule as long as the run."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1, "lr": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Hooked(Net):
    """Module that scales gradients before every update, and counts batches and clamps weights after it."""

    steps = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(0.9**self.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1
        with torch.no_grad():
            for p in self.model.parameters():
                p.clamp_(-0.3, 0.3)


class KeepsMeans(L.Callback):
    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.means[name] = self.means.get(name, torch.zeros(())) + p.detach().mean()


class Draws(Net):
    """Module that draws from the generators of torch, NumPy and Python before it calls the network."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"] * float(np.random.uniform(0.5, 1.5)) + random.gauss(0.0, 0.1) + torch.rand(len(batch["x"]), 1)
        return F.cross_entropy(self.model(x), batch["y"])


class Padded(Net):
    def microbatch_weight(self, microbatch: dict[str, Tensor]) -> float:
        return float((microbatch["y"] != -100).sum())


class Sums(Net):
    """Module whose loss is a sum over samples, not a mean."""

    loss_reduction = "sum"

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="sum")


def gpt(**options: Any) -> GPTModule:
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=32, dim=16, num_layers=3, num_heads=2, context_length=16, **options)
    base = functools.partial(MuonAdamW, lr=0.02)
    return GPTModule(config, functools.partial(ErrorFeedback, base=base), warmup_steps=2)


def schedule_free(parameters: Any) -> Any:
    return pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW(parameters, lr=1e-3)


def all_but_the_first(parameters: Any) -> Any:
    return torch.optim.SGD([*parameters][1:], lr=0.1)


class Texts(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=batch, labels=batch).loss


def llama() -> Net:
    return Texts(of_transformers("llama", num_hidden_layers=2, use_cache=False, attention_dropout=0.1))


TWICE = {"accumulate_grad_batches": 2}
EXPERTS = functools.partial(gpt, moe=MoEConfig(num_experts=4, router="sigmoid"))
RIGHT: dict[str, tuple[Callable[[], Any], list[Any], dict[str, Any]]] = {
    "three-stages-exact": (Net, batches(7), {"stages": 3, "slack": "exact", "gradient_clip_val": 0.1, **TWICE}),
    "hooks-around-an-update": (Hooked, batches(), {"partition": [3, 4]}),
    "one-is-not-trained": (lambda: Net(optimizer=all_but_the_first), batches(), {"gradient_clip_val": 0.1}),
    "a-sum": (Sums, batches(7), {"microbatches": 3, "delay": 0}),
    "gpt": (gpt, tokens(), {"gradient_clip_val": 1.0, "lookahead": 1, "microbatches": 6, "updates": 2}),
}
SLOW: dict[str, tuple[Callable[[], Any], list[Any], dict[str, Any]]] = {
    "groups-and-a-schedule": (Scheduled, batches(), {"updates": 2, **TWICE}),
    "experts": (EXPERTS, tokens(), {"stages": 3, "updates": 2}),
    "llama": (llama, tokens(), {"gradient_clip_val": 1.0, "updates": 2}),
    "padding": (Padded, batches(ignored=3), {}),
    "random-numbers": (Draws, batches(), {}),
    "schedule-free": (lambda: Net(optimizer=schedule_free), batches(), {}),
}


@pytest.mark.parametrize("name", [*RIGHT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_is_right(name: str) -> None:
    make, data, options = (RIGHT | SLOW)[name]
    module = make()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    report = check_model(module, data, **{"updates": 3, **options})
    assert report.ok, str(report)
    assert len(report.comparisons) == 3 - (options.get("delay") == 0)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_what_a_callback_keeps_is_compared() -> None:
    (found, *_) = check_model(Net(), batches(), callbacks=[KeepsMeans()], updates=3).differences
    assert (found.comparison, found.kind) == ("delayed", "value at the end")
    assert found.name == "KeepsMeans.means['model.0.weight']"
    marked = after_own_update(KeepsMeans())
    assert check_model(Net(), batches(), callbacks=[marked], updates=3).ok
    assert check_model(Net(), batches(), callbacks=[EMAWeightAveraging(decay=0.9)], updates=2).ok


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


def test_a_data_module() -> None:
    report = check_model(Net(), Data(), updates=2)
    assert report.ok, str(report)


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(DIM, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)))


class Mixes(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        other = torch.randperm(len(batch["x"]))
        return F.cross_entropy(self.model(batch["x"] + 0.1 * batch["x"][other]), batch["y"])


def test_what_makes_it_right_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The report has a hint that removes the difference, and stderr a line for each comparison."""
    report = check_model(Net(), batches(8, ignored=3), updates=1, **TWICE)
    (difference,) = report.differences
    assert (difference.comparison, difference.update, difference.kind) == ("whole", 0, "loss")
    assert difference.values[0] != difference.values[1]
    assert "2 batches (2 per update) in 4 microbatches each" in str(report)
    assert "return float((microbatch['y'] != -100).sum())" in str(report)
    assert str(report).endswith("\nNOT OK: whole differs")
    names = ("pieces", "delayed", "whole")
    assert capsys.readouterr().err.splitlines() == [f"check_model: comparing {name} ..." for name in names]


@pytest.mark.parametrize(
    ("make", "why"),
    [(BatchNorm, "BatchNorm, which normalises over the samples of"), (Mixes, "the step draws a permutation")],
)
def test_what_pieces_compute_otherwise_by_nature_is_not_compared(make: Callable[[], Net], why: str) -> None:
    report = check_model(make(), batches(), updates=2)
    assert report.ok
    assert f"not compared: {why}" in str(report)


def test_errors_of_the_users_code_show_as_they_are() -> None:
    hook = sys.excepthook
    with pytest.raises(KeyError, match="'x'"):
        check_model(Net(), [{"y": torch.zeros(8)}])
    assert sys.excepthook is hook, "it shows the traceback"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``asyncpp check`` uses the number of stages and the data of the recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    write_texts(tmp_path / "text", 20)
    check.main([
        "--config", str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml"), "--updates", "1",
        "--data.source", "text", "--data.cache_dir", "cache", "--data.val_fraction", "0.2", "--data.batch_size", "6",
        "--data.context_length", "16", "--model.config.context_length", "16", "--model.config.dim", "32",
        "--trainer.accumulate_grad_batches", "3",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "stage 1: blocks.2, blocks.3, head" in printed
    assert printed.count("equal to the last bit") == 2
    assert printed.splitlines()[-1] == "OK: nothing differs"
    assert "3 batches (3 per update)" in printed
    assert not (tmp_path / "runs").exists(), "a check leaves no logs"
