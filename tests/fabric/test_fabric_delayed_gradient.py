"""Fabric's ``delayed_gradient``: all stages in this process, under the same loop, equal the oracle."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_asyncpp.fabric import DelayedGradientStrategy
from tests.helpers.cases import Case
from tests.helpers.compare import assert_same_losses, assert_same_weights
from tests.helpers.engine import run_oracle
from tests.helpers.fabric import Run

CASES = {
    "least": (3, Case(6, 0, staleness="least", max_norm=0.3, dropout=0.3, scheduler=True)),
    "slack": (3, Case(6, 0, staleness="least", slack="exact", error_feedback=1.0)),
    "uniform": (4, Case(5, 1, optimizer="muon", error_feedback=1.0, accumulate=2, tied=True)),
    "sync": (2, Case(3, None, delay=0, max_norm=0.3, routed=True)),
    "skip": (2, Case(4, 1, nan_at=2, unequal_weights=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_oracle(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    stages, case = CASES[name]
    run = Run(case, stages=stages)
    run.train()
    result = run.result()
    weights, losses = run_oracle(case, stages)
    assert_same_weights([result], weights)
    if case.accumulate == 1:
        assert_same_losses([result], losses)


def test_it_goes_on_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    case = Case(6, 0, staleness="least", optimizer="muon", error_feedback=1.0, scheduler=True)
    run = Run(case, stages=3)
    run.train(stop=3)
    run.strategy.drain()
    run.fabric.save(f"{tmp_path}/at", run.state)
    other = Run(case, stages=3, spoilt=True)
    other.fabric.load(f"{tmp_path}/at", other.state)
    other.train(start=3)
    assert_same_weights([other.result()], run_oracle(case, 3)[0])


class Twice(nn.Module):
    """Called twice in a step, which no pipeline could cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


def test_a_model_that_is_not_cut_is_one_stage_whose_gradients_are_one_update_old() -> None:
    strategy = DelayedGradientStrategy()
    fabric = L.Fabric(strategy=strategy, devices=1, accelerator="cpu")
    fabric.launch()
    torch.manual_seed(0)
    plain, given = Twice(), Twice()
    plain.load_state_dict(given.state_dict())
    model = fabric.setup_module(given)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    versions = [[p.detach().clone() for p in plain.parameters()]]
    for t, batch in enumerate(torch.randn(5, 3, 4)):
        strategy.training_step(lambda x: model(model(x)).square().mean(), batch)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(plain.parameters()), versions[max(t - 1, 0)])
        plain.zero_grad()
        plain(plain(batch)).square().mean().backward()
        versions.append([w - 0.1 * p.grad for w, p in zip(versions[t], plain.parameters())])
    strategy.drain()
    for actual, expected in zip(given.parameters(), versions[-1]):
        torch.testing.assert_close(actual, expected)


def test_several_devices_are_refused() -> None:
    strategy = DelayedGradientStrategy(stages=2)
    with pytest.raises(Exception, match="devices=2: delayed_gradient runs all stages of a pipeline in one process"):
        L.Fabric(strategy=strategy, devices=2, accelerator="cpu").launch()
