"""A layer of several submodules and parameters: in pipelines it equals the oracle, and names stay what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, apply_layers, check_model
from lightning_asyncpp.core.cut.units import pipeline_units
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_parts, mini_batches_of, oracle
from tests.trainer.runs import DIM, Net, Run, Samples, fit


class Forked(nn.Module):
    """Its head and its tail have parts and parameters that stand by themselves; one module is in both of them."""

    def __init__(self, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((DIM,), 0.1))
        self.entry = nn.ModuleDict({"main": nn.Linear(DIM, DIM), "gate": nn.Linear(DIM, DIM)})
        self.norm = nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)])
        self.factor = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(DIM, 1)
        self.dropout = nn.Dropout(dropout)
        self.tied = tied

    def pipeline_layers(self) -> list[Any]:
        norm = [self.norm] if self.tied else []
        return [
            ([self.shift, self.entry["main"], self.entry["gate"], self.norm], self._enter),
            *self.blocks,
            ([*norm, self.factor, self.out], self._leave),
        ]

    def _enter(self, parts: list[Any], x: Tensor) -> Tensor:
        shift, main, gate, norm = parts
        return norm(self.dropout(main(x) * torch.sigmoid(gate(x)) + shift))

    def _leave(self, parts: list[Any], x: Tensor) -> Tensor:
        return self.out(self.dropout(self.norm(x) if self.tied else x) * self.factor)

    def forward(self, x: Tensor) -> Tensor:
        """Written out: no layer of several parts is called as such."""
        x = self.norm(self.dropout(self.entry["main"](x) * torch.sigmoid(self.entry["gate"](x)) + self.shift))
        for block in self.blocks:
            x = block(x)
        return self.out(self.dropout(self.norm(x) if self.tied else x) * self.factor)


class ForkedNet(Net):
    """Trains it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = Forked(run.dropout, tied="untied" not in run.dataset)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equals_the_oracle(pools: Pools, stages: int, dropout: float) -> None:
    run = Run(ForkedNet, options={"micro_batches": 4}, dropout=dropout)
    results = pools.run(stages, fit, run)
    expected, _ = oracle(run, 4, list(mini_batches_of(run)))
    parts = [result["weights"] for result in results]
    merged = {name: value for part in parts for name, value in part.items()}
    assert_equal_weights(merged, expected)


def test_a_module_that_is_in_two_layers_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    batches = [{k: torch.stack([Samples(8)[i][k] for i in range(8)]) for k in ("x", "y")}]
    for dropout in (0.0, 0.2):
        report = check_model(ForkedNet(Run(Net, dropout=dropout)), batches, stages=3, micro_batches=4)
        assert report.bitwise, str(report)


def test_layers_applied_in_order_are_the_forward() -> None:
    model, x = Forked(), torch.randn(3, DIM)
    assert torch.equal(model(x), apply_layers(model, x))
    units = pipeline_units(model)
    assert [unit.name for unit in units] == ["entry.main + entry.gate + 2 more", "blocks.0", "blocks.1",
                                             "norm + out + 1 more"]  # fmt: skip
    assert units[0].module is pipeline_units(model)[0].module, "hooks that somebody put there go on"
    names = {unit.path(name) for unit in units for name, _ in unit.module.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    copied = copy.deepcopy(model)
    assert pipeline_units(copied)[0].module.get_submodule("norm") is copied.norm


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (lambda model: [([model.entry, model.entry["main"]], len), model.blocks], "entry.main, which is in entry"),
        (lambda model: [([model.norm, "norm"], len)], "no part of the model: <class 'str'>"),
        (lambda model: [([nn.Linear(1, 1)], len)], "no part of the model"),
        (lambda model: [([model.norm], None)], "a list without a function"),
    ],
)
def test_what_a_list_must_not_hold(layers: Any, problem: str) -> None:
    model = Forked()
    model.pipeline_layers = lambda: layers(model)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=problem):
        pipeline_units(model)


def test_joined_parts_are_disjoint_but_for_what_is_shared(pools: Pools) -> None:
    run = Run(ForkedNet, options={"micro_batches": 2}, dataset="samples")
    first, last = (result["weights"] for result in pools.run(2, fit, run)[::-1])
    shared = {name for name in first if name in last}
    assert shared <= {"model.norm.weight", "model.norm.bias"}
    assert joined_parts([first, {name: value for name, value in last.items() if name not in shared}])
