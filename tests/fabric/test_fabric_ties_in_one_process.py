"""A parameter of two stages in one process: its copy follows whatever is loaded, written or evaluated."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_asyncpp.core.local import LocalPipeline
from lightning_asyncpp.fabric import DelayedGradientStrategy
from lightning_asyncpp.optim import ErrorFeedback

TOKENS, DIM = 10, 8


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with its own count of steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p -= group["lr"] / group["k"] * p.grad


class Run:
    """Two stages, whose first and last layer share a weight."""

    def __init__(self, optimizer: Any = None, precision: Any = "32-true", **settings: Any) -> None:
        self.strategy = DelayedGradientStrategy(stages=2, microbatches=4, **settings)
        self.fabric = L.Fabric(strategy=self.strategy, devices=1, accelerator="cpu", precision=precision)
        self.fabric.launch()
        torch.manual_seed(1)
        first = nn.Embedding(TOKENS, DIM)
        layers = nn.Sequential(first, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), Head(first.weight))
        self.model = self.fabric.setup_module(layers)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.optimizer = self.fabric.setup_optimizers(make(self.model.parameters()))
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for number in range(start, stop):
            x, y = torch.randint(0, TOKENS, (2, 8), generator=torch.Generator().manual_seed(number))
            loss = self.strategy.training_step(lambda b: cross_entropy(self.model(b[0]), b[1]), (x, y))
            self.optimizer.step()
            losses.append(float(loss))
        self.strategy.drain()
        return losses

    def check_copies(self) -> None:
        engine = self.strategy.session.running()
        assert isinstance(engine, LocalPipeline)
        first, last = (part.weights for part in engine.engines)
        for version in range(max(0, first.newest - first.room + 1), first.newest + 1):
            assert torch.equal(first.leaves(version)["0.weight"], last.leaves(version)["3.weight"]), version


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")


def test_weights_loaded_in_the_middle_are_the_copys_too(tmp_path: object) -> None:
    run = Run(staleness="uniform")
    run.train(0, 2)
    run.fabric.save(f"{tmp_path}/at", {"model": run.model})
    run.train(2, 5)
    run.fabric.load(f"{tmp_path}/at", {"model": run.model})
    run.check_copies()


def test_a_checkpoint_without_delay_goes_on_with_one(tmp_path: object) -> None:
    run = Run(delay=0)
    run.train(0, 4)
    run.fabric.save(f"{tmp_path}/at", run.state)
    other = Run(staleness="uniform")
    other.fabric.load(f"{tmp_path}/at", other.state)
    other.check_copies()
    assert len(other.train(4, 6)) == 2


def test_a_checkpoint_without_the_pipelines_entry_is_loaded_in_the_middle(tmp_path: object) -> None:
    run = Run(staleness="uniform")
    run.train(0, 2)
    run.fabric.save(f"{tmp_path}/at", run.state)
    saved = torch.load(f"{tmp_path}/at", weights_only=False)
    del saved["pipeline"]
    torch.save(saved, f"{tmp_path}/plain")
    run.train(2, 5)
    run.fabric.load(f"{tmp_path}/plain", run.state)
    run.train(5, 7)
    run.check_copies()


def test_options_of_steps_before_a_load_are_forgotten(tmp_path: object) -> None:
    run = Run(lambda parameters: Counting(parameters, lr=0.1))
    run.train(0, 2)
    run.fabric.save(f"{tmp_path}/at", run.state)
    run.train(2, 7)
    run.fabric.load(f"{tmp_path}/at", run.state)
    run.train(7, 9)
    assert run.optimizer.param_groups[0]["k"] == 4


def test_evaluation_runs_on_the_trained_weights_of_the_copy() -> None:
    base = functools.partial(torch.optim.SGD, lr=1.0)
    run = Run(
        lambda parameters: ErrorFeedback(parameters, base), "bf16-mixed", weight_dtype="bf16", staleness="uniform"
    )
    run.train(0, 6)
    newest = run.strategy.session.running().weights.shown()["0.weight"]
    layers = run.strategy.session.stage.model  # type: ignore[union-attr]
    seen: list[Tensor] = []
    for layer in (layers[0], layers[3]):  # type: ignore[index]
        layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    x = torch.randint(0, TOKENS, (4,))
    run.strategy.evaluation_step(lambda b: run.model(b), x)
    assert seen
    assert all(weight.dtype == newest.dtype and torch.equal(weight, newest) for weight in seen)


def test_masters_written_by_a_hook_are_the_copys_at_once() -> None:
    run = Run(precision="bf16-mixed", weight_dtype="bf16")
    run.train(0, 3)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    run.strategy.session.running().weights.adopt()
    run.check_copies()
