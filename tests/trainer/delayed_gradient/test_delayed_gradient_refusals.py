"""Emulated delays: what cannot be trained so is refused, with every reason at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp import ConfigurationError, DelayedGradientStrategy
from tests.trainer.delayed_gradient.delays import Branches, train
from tests.trainer.failures.mistakes import Uncuttable
from tests.trainer.runs import Net, Run


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"delay": -1}, ["delay=-1 must be 0 or more"]),
        ({"delay": "pipedreams"}, ["delay='pipedreams' must be", "pipedream, fresh_last_stage, least", "needs stages"]),
        ({"delay": "pipedream"}, ["delay='pipedream' needs stages", "got None"]),
        ({"delay": "pipedream", "stages": 0}, ["needs stages", "got 0"]),
        ({"delay": 1.5, "stages": True}, ["2 problems", "delay=1.5 must be a whole number", "stages=True must be"]),
        ({"micro_batches": "4", "stage_of": 3}, ["micro_batches='4' must be a whole", "stage_of=3 must be a function"]),
        (
            {"delay": "fresh_last_stage", "stages": 2, "nonfinite_gradients": "skip"},
            ["steps stages before it is known", "use 'stop'"],
        ),
        (
            {"delay": "least", "stages": 2, "nonfinite_gradients": "skip", "slack": -1, "lookahead": -1},
            [
                "4 problems",
                "slack=-1 must be",
                "lookahead=-1 must be",
                "needs micro_batches",
                "use 'stop', or slack='exact'",
            ],
        ),
        ({"delay": "least", "stages": 3, "micro_batches": 2}, ["micro_batches=2 is smaller than stages=3"]),
        ({"slack": 1, "lookahead": 1}, ["slack=1 has a meaning only with delay='least'", "lookahead=1 has a meaning"]),
        (
            {"delay": "fresh_last_stage", "stages": 2, "last_stage_norm": "own"},
            ["last_stage_norm='own' has a meaning only"],
        ),
        ({"micro_batches": 2, "last_stage_norm": "own"}, ["only with delay='fresh_last_stage' and micro_batches"]),
        (
            {"delay": "pipedream", "stages": 2, "micro_batches": 2, "partition": "even"},
            ["partition='even' must be 'auto'"],
        ),
        (
            {"delay": "pipedream", "stages": 3, "micro_batches": 2, "partition": [4, 5]},
            ["partition=[4, 5] is for 2 stages, but there are 3"],
        ),
        (
            {"delay": "pipedream", "stages": 2, "partition": [4, 5]},
            ["partition=[4, 5] has a meaning only", "micro_batches"],
        ),
        ({"delay": 1, "micro_batches": 2, "partition": "uniform"}, ["partition='uniform' has a meaning only"]),
        ({"last_stage_norm": "old"}, ["last_stage_norm='old' must be one of before, own, exact"]),
        ({"delay": 1, "stages": 4}, ["stages has no meaning with delay=1"]),
        ({"delay": 1, "stage_of": len}, ["stage_of has no meaning with delay=1"]),
        (
            {"delay": -2, "micro_batches": 0, "nonfinite_gradients": "hide"},
            ["3 problems", "delay=-2", "micro_batches=0", "nonfinite_gradients='hide'"],
        ),
    ],
)
def test_wrong_arguments_are_named_all_at_once(options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DelayedGradientStrategy(**options)
    assert all(message in str(caught.value) for message in messages)


def test_a_partition_that_does_not_fit_the_model() -> None:
    ways: dict[str, Any] = {"delay": "fresh_last_stage", "stages": 2, "micro_batches": 2}
    for partition, message in (([4, 4], "places 8 layers, but the model has 9"), ([9, 1], "places 10 layers")):
        with pytest.raises(ConfigurationError, match=message):
            train(Run(Net, "delayed", ways | {"partition": partition}))
    with pytest.raises(ConfigurationError, match="which the pipeline cannot cut"):
        train(Run(Uncuttable, "delayed", ways | {"partition": "uniform"}))


class Manual(Branches):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False
        self.loss_reduction = "median"


class TwoOptimizers(Branches):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.mix.parameters()), torch.optim.SGD(self.convolution.parameters())]


class ByLBFGS(Branches):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Lazy(Branches):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.late = nn.LazyLinear(2)


class ForeignParameters(Branches):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 3).parameters())


class NoGradient(Branches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"].detach()


class Frozen(Branches):
    def configure_optimizers(self) -> Any:
        self.requires_grad_(False)
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("module", "options", "messages"),
    [
        (Manual, {"micro_batches": 2}, ["2 problems", "automatic_optimization=False", "loss_reduction='median'"]),
        (ByLBFGS, {}, ["LBFGS evaluates the loss several times"]),
        (Lazy, {}, ["parameters have no shape yet (late.weight, late.bias)"]),
        (ForeignParameters, {}, ["2 tensor(s), the first of shape (3, 2), that are no parameters"]),
        (NoGradient, {"micro_batches": 2}, ["does not depend on the module's parameters"]),
        (Frozen, {"micro_batches": 2}, ["no parameter of the module requires a gradient"]),
        (Branches, {"delay": "pipedream", "stages": 99}, ["stages=99 is more than the module has parameters (12)"]),
        (Branches, {"delay": "pipedream", "stages": 2, "stage_of": len}, ["stage_of('scale') returned 5", "0 to 1"]),
    ],
)
def test_what_cannot_be_trained_so_is_refused(module: Any, options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        train(Run(module, "delayed", options))
    assert all(message in str(caught.value) for message in messages), caught.value


def test_several_optimizers_are_refused() -> None:
    with pytest.raises((ConfigurationError, RuntimeError), match="multiple optimizers"):
        train(Run(TwoOptimizers, "delayed"))
