"""check_model: what a pipeline trains right is equal, and what would differ is named."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_asyncpp
from lightning_asyncpp import GPTModule, after_own_update, apply_layers, check_model
from lightning_asyncpp.models import GPTConfig, MoEConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.tools.check import check
from lightning_asyncpp.tools.check.record import LOSS, UPDATES, Record, Value, first_difference

DIM, CLASSES = 8, 4
AdamW = functools.partial(torch.optim.AdamW, lr=0.02)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(DIM, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(),
        nn.Linear(16, CLASSES),
    )  # fmt: skip


class Net(L.LightningModule):
    """A classifier."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = model or net()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters())


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


# -- what works ---------------------------------------------------------------------------------------------------


class Scheduled(Net):
    """Two groups, and a schedule as long as the run."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1, "lr": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class RateByNumberOfParameters(Net):
    """Sees all of them, on every stage."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / sum(p.numel() for p in self.parameters()) ** 0.5, momentum=0.9)


class Averaged(Net):
    """Keeps a mean of its weights, and limits them, after every update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16, DIM))
        self.steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def configure_callbacks(self) -> list[L.Callback]:
        return [after_own_update(LimitsWeights())]


class LimitsWeights(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            pl_module.model[0].weight.clamp_(-0.3, 0.3)
            pl_module.mean.lerp_(pl_module.model[0].weight, 0.5)


class Sums(Net):
    """A sum, over unequal pieces."""

    loss_reduction = "sum"

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="sum")


class Tied(nn.Module):
    """A language model whose first and last layer share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, DIM)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)])
        self.head = nn.Linear(DIM, 32, bias=False)
        self.head.weight = self.embed.weight

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.embed, *self.blocks, self.head]

    def forward(self, x: Tensor) -> Tensor:
        return apply_layers(self, x)


class Language(Net):
    def __init__(self) -> None:
        super().__init__(Tied())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Side(nn.Module):
    """Computes something beside what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.side(x)


class Chooses(nn.Module):
    """Uses what is beside in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, CLASSES)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, side = pair
        return self.linear(x if x.mean() > 0 else x + side)


class Drops(Net):
    """Needs the result of a layer of the first stage in some batches."""

    def __init__(self) -> None:
        torch.manual_seed(10)
        super().__init__(nn.Sequential(nn.Linear(DIM, DIM), Side(), Chooses()))


def gpt(**options: Any) -> GPTModule:
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=32, dim=16, num_layers=3, num_heads=2, context_length=16, **options)
    base = functools.partial(MuonAdamW, lr=0.02)
    return GPTModule(config, functools.partial(ErrorFeedback, base=base), warmup_steps=2)


TWICE = {"accumulate_grad_batches": 2}
RIGHT: dict[str, tuple[Callable[[], Net], list[Any], dict[str, Any]]] = {
    "dropout, clipped": (Net, batches(), {"gradient_clip_val": 0.1}),
    "three stages, uniform": (Net, batches(), {"stages": 3, "staleness": "uniform", "gradient_clip_val": 0.1}),
    "three stages, exact": (Net, batches(7), {"stages": 3, "slack": "exact", "gradient_clip_val": 0.1, **TWICE}),
    "lookahead, slack": (Net, batches(), {"slack": 1, "lookahead": 1, "microbatches": 6, **TWICE}),
    "synchronous": (Net, batches(), {"delay": 0}),
    "one stage": (Net, batches(), {"stages": 1}),
    "clipped by value": (Net, batches(), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": (Net, batches(), {"precision": "bf16-mixed"}),
    "groups and a schedule": (Scheduled, batches(), TWICE),
    "rate by number of parameters": (RateByNumberOfParameters, batches(), {}),
    "hooks after an update": (Averaged, batches(), {"partition": [3, 4]}),
    "a sum": (Sums, batches(7), {"microbatches": 3, "delay": 0}),
    "tied": (Language, tokens(), {"gradient_clip_val": 0.1, **TWICE}),
    "a result dropped": (Drops, batches(), {"partition": [2, 1], "gradient_clip_val": 0.1}),
    "GPT": (gpt, tokens(), {"gradient_clip_val": 1.0, **TWICE}),
    "experts": (functools.partial(gpt, moe=MoEConfig(num_experts=4, router="sigmoid")), tokens(), {"stages": 3}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name: str) -> None:
    make, data, options = RIGHT[name]
    module = make()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    report = check_model(module, data, **options)
    assert report.ok, str(report)
    assert len(report.comparisons) == 3 - (options.get("delay") == 0)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


# -- what differs -------------------------------------------------------------------------------------------------


class SAM(torch.optim.SGD):
    """Takes its gradient a step up the hill."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        moved = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in moved:
            p.data.add_(p.grad, alpha=0.1)
        with torch.enable_grad():
            closure()
        for p, before in moved:
            p.data.copy_(before)
        return super().step()


class SharpnessAware(Net):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lr=0.05)


class Scaled(nn.Module):
    """Computed again in the backward, with the attribute that it has by then."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: (self.linear(x) * self.scale).square(), x, use_reentrant=False)


class AnnealsALayer(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(DIM, DIM), Scaled(), Scaled(), nn.Linear(DIM, CLASSES)))

    def on_train_batch_start(self, *_: Any) -> None:
        for layer in (self.model[1], self.model[2]):
            layer.scale *= 0.7


class Contrastive(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = F.normalize(self.model(batch["x"]), dim=1)
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))


WRONG: dict[str, tuple[Callable[[], Net], list[Any], dict[str, Any], tuple[str, str]]] = {
    "SAM": (SharpnessAware, batches(), {}, ("pieces", "loss")),
    "annealed layer": (AnnealsALayer, batches(), {}, ("delayed", "gradient")),
    "contrastive": (Contrastive, batches(), {}, ("whole", "loss")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_differs(name: str) -> None:
    make, data, options, expected = WRONG[name]
    report = check_model(make(), data, **options)
    assert not report.ok
    found = report.differences[0]
    assert (found.comparison, found.kind) == expected, str(report)
    assert found.values[0] != found.values[1]
    assert f"update {found.update}, {found.kind}" in str(report)
    assert found.name.startswith("batch ") or f"of {found.name} (stage {found.stage}): a norm of" in str(report)
    assert "May be explained by https://lightning-asyncpp.github.io/lightning-asyncpp/concepts/contract/" in str(report)


class KeepsMeans(L.Callback):
    """Meets weights that are one update old, in attributes and in their containers."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.means[name] = self.means.get(name, torch.zeros(())) + p.detach().mean()


def test_what_a_callback_keeps_is_compared() -> None:
    report = check_model(Net(), batches(), callbacks=[KeepsMeans()])
    found = report.differences[0]
    assert (found.comparison, found.kind) == ("delayed", "value at the end")
    assert found.name == "KeepsMeans.means['model.0.weight']"
    marked = lightning_asyncpp.after_own_update(KeepsMeans())
    assert check_model(Net(), batches(), callbacks=[marked, EMAWeightAveraging(decay=0.9)]).ok


def test_the_number_of_updates_comes_first() -> None:
    expected, found = Record(), Record()
    for record, count in ((expected, 2), (found, 4)):
        record.seen[0, LOSS, ""] = Value(count, count)
        record.seen[0, UPDATES, "model.0.weight"] = Value(count, count)
    apart = first_difference(expected, found)
    assert apart is not None
    assert (apart.kind, apart.values) == ("number of updates", (2, 4))


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(DIM, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)))


class Mixes(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        other = torch.randperm(len(batch["x"]))
        return F.cross_entropy(self.model(batch["x"] + 0.1 * batch["x"][other]), batch["y"])


class Weighs(Net):
    def microbatch_weight(self, microbatch: dict[str, Tensor]) -> float:
        return float((microbatch["y"] != -100).sum())


def test_a_batch_in_which_nothing_counts_is_left_out() -> None:
    found = check_model(Weighs(), [*batches(), *batches(8, ignored=8)], updates=4).differences[0]
    assert (found.kind, found.values) == ("number of updates", (4, 3))


class ForgetsThatItIsASum(Sums):
    loss_reduction = "mean"


@pytest.mark.parametrize(
    ("make", "hint"),
    [(Net, "return float((microbatch['y'] != -100).sum())"), (ForgetsThatItIsASum, "with `loss_reduction = 'sum'`")],
)
def test_what_makes_it_right_is_printed(make: Callable[[], Net], hint: str) -> None:
    report = check_model(make(), batches(8, ignored=3))
    (difference,) = report.differences
    assert (difference.comparison, difference.kind) == ("whole", "loss")
    assert hint in str(report)


def test_batch_norm_and_a_permutation_is_not_compared() -> None:
    report = check_model(BatchNorm(), batches())
    assert report.ok
    assert "equal up to rounding; not compared: BatchNorm, which normalises over the samples of" in str(report)
    report = check_model(Mixes(), batches())
    assert report.ok
    assert "not compared: the step draws a permutation" in str(report)


def test_errors_of_the_users_code_show_as_they_are() -> None:
    class Breaks(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise KeyError("what")

    with pytest.raises(KeyError, match="what"):
        check_model(Breaks(), batches())
    hook = sys.excepthook
    with pytest.raises(KeyError, match="'x'"):
        check_model(Net(), [{"y": torch.zeros(8)}])
    assert sys.excepthook is hook, "it shows the traceback"
    with pytest.raises(lightning_asyncpp.ConfigurationError, match="got no batch"):
        check_model(Net(), [])


class ReadsTheLastBatch(Net):
    """An attribute kept between calls reaches the first stage."""

    scale = 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(batch["x"] * (self.scale if batch_idx else 1.0))
        self.scale = float(output.detach().std())
        return F.cross_entropy(output, batch["y"])


def test_an_update_may_be_of_several_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """A line tells what is under way."""
    assert check_model(ReadsTheLastBatch(), batches(), updates=1, delay=0).ok
    report = check_model(ReadsTheLastBatch(), batches(), updates=1, **TWICE)
    found = report.differences[0]
    assert (found.comparison, found.update, found.kind, found.name) == ("pieces", 0, "loss", "batch 1")
    assert "2 batches (2 per update) in 4 microbatches each, loss" in str(report)
    names = ("pieces", "whole", "pieces", "whole")
    assert capsys.readouterr().err.splitlines() == [f"check_model: comparing {name} ..." for name in names]


# -- the command --------------------------------------------------------------------------------------------------


def arguments(folder: Path, *more: str) -> list[str]:
    (folder / "text").mkdir(exist_ok=True)
    for index in range(20):
        (folder / "text" / f"{index}.txt").write_text(f"document {index} of some words, not many\n" * 20)
    return [
        "--config", str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml"),
        "--data.init_args.source", str(folder / "text"), "--data.init_args.cache_dir", str(folder / "cache"),
        "--data.init_args.val_fraction", "0.2", "--data.init_args.batch_size", "6",
        "--data.init_args.context_length", "16", "--model.init_args.config.context_length", "16",
        "--model.init_args.config.dim", "32", *more,
    ]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of stages of the recipe, and another one; more stages than layers are refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    check.main(arguments(tmp_path, "--updates", "2", "--trainer.accumulate_grad_batches", "3"))
    printed = capsys.readouterr().out
    assert "stage 1: blocks.2, blocks.3, head" in printed
    assert printed.count("equal to the last bit") == 2
    assert "6 batches (3 per update)" in printed
    with pytest.raises(lightning_asyncpp.ConfigurationError, match="fewer than the 9 stages"):
        check.main(arguments(tmp_path, "--stages", "9", "--updates", "1"))
    assert not (tmp_path / "runs").exists(), "a check leaves no logs"


class BringsData(Net):
    """Has its own loader, as long as its Trainer runs."""

    def setup(self, stage: str) -> None:
        self.size = 8

    def train_dataloader(self) -> Any:
        data = [sample for batch in batches(self.size) for sample in zip(batch["x"], batch["y"])]
        return DataLoader([{"x": x, "y": y} for x, y in data], batch_size=4 * self.trainer.max_epochs)


def test_a_recipe_whose_module_brings_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {__name__}.BringsData\n"
        "trainer: {strategy: async_pipeline, devices: 2, accelerator: cpu, max_epochs: 2, logger: false}\n"
    )
    check.main([str(recipe)])
    assert capsys.readouterr().out.count("equal to the last bit") == 2
