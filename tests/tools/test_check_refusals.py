"""check_model names what would break in a pipeline, with the mend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError, apply_layers, check_model
from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.reference import train_reference
from tests.core.cases import DIM, make_model
from tests.tools.test_check import Layer, Named, around_a_cut, batches, linear, step
from tests.trainer.failures.mistakes import (
    CallsTwice,
    CompiledInPlace,
    Lazy,
    NeverCalls,
    NoModel,
    OwnBackward,
    ParameterOutside,
)
from tests.trainer.runs import Net, Run


class UsesItsWeights(Net):
    """Adds a penalty on weights that the last stage holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + list(self.model.children())[-1].weight.square().sum()


class AsksItsTrainer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.trainer.current_epoch)


class Forward(nn.Module):
    """Two layers, and a forward of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = linear(), nn.Linear(DIM, 1)
        self.function = function

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda m, x: m.second(m.first(2 * x)), "their outputs differ by"),
        (lambda m, x: m.second(m.first(x)).tanh(), "their outputs differ by"),
        (lambda m, x: m.second(m.first(x)).squeeze(1), "one returns a tensor of shape (4,)"),
        (lambda m, x: {"y": m.second(m.first(x))}, "one returns a dict, the other a tensor"),
        (lambda m, x: m.second(m.first(x.flatten(1)[:, :DIM])), "layer 'first' (Linear) cannot take the arguments of"),
    ],
    ids=["before", "after", "another shape", "another type", "a layer that cannot"],
)
def test_a_forward_that_does_more_than_its_layers(function: Any, text: str) -> None:
    given = batches(8)
    if "cannot" in text:
        given = [{"x": batch["x"].repeat(1, 2), "y": batch["y"]} for batch in given]
    with pytest.raises(ConfigurationError) as caught:
        check_model(Forward(function), given, step)
    assert text in str(caught.value)
    assert "pipeline_layers() pairs with one" in str(caught.value) or "pair it with a function" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (CallsTwice, "after calling twice self.model"),
        (NeverCalls, "without calling self.model"),
        (ParameterOutside, "parameters outside the layers of self.model: temperature"),
        (NoModel, "NoModel has no self.model"),
        (AsksItsTrainer, "training_step asks for its Trainer, .* give check_model a step"),
        (OwnBackward, r"OwnBackward has a backward\(\) of its own, which is not called"),
        (CompiledInPlace, "self.model was compiled as a whole"),
        (Lazy, r"parameters have no shape yet \(0.weight, 0.bias, 1.weight, 1.bias\)"),
        (UsesItsWeights, "a parameter of self.model was used directly in training_step"),
    ],
)
def test_lightning_modules_that_are_refused(module: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        check_model(module(Run(module)), batches())


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (lambda f, x: Named(f(x), x), "a layer at a cut returned the named tuple Named (layer '0')"),
        (lambda f, x: (f(x), torch.ones(2, dtype=torch.uint16)), "dtype torch.uint16"),
        (lambda f, x: (f(x),) * 257, "layer '0' at a cut returned 257 tensors; at most 256 may cross a cut"),
    ],
    ids=["named", "codes", "many"],
)
def test_what_cannot_cross(before: Layer, text: str) -> None:
    model = around_a_cut(before, lambda f, c: f(c[0]))
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:
        check_model(model, batches(), step, stages=3)
    assert text in str(caught.value)
    assert check_model(model, batches(), step, stages=1).bitwise


def test_a_step_that_keeps_something() -> None:
    calls: list[int] = []

    def counting(model: nn.Module, micro_batch: Any) -> Tensor:
        calls.append(1)
        return step(model, micro_batch) * len(calls)

    with pytest.raises(
        ConfigurationError, match=r"trained to something else .*the first loss to differ is that of"
    ) as e:
        check_model(make_model(), batches(), counting)
    assert "stage 0: 0, 1" in str(e.value), "it is not said how the model was cut"


def test_a_pipeline_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with another delay: from the first mini-batch on that would run on other weights."""

    def without_delay(*args: Any, **kwargs: Any) -> list[float]:
        return train_reference(*args, **{**kwargs, "delay": 0})

    monkeypatch.setattr("lightning_asyncpp.tools.check.model_check.train_reference", without_delay)
    with pytest.raises(ConfigurationError, match="the first loss to differ is that of mini-batch 1"):
        check_model(make_model(), batches(), step, staleness="uniform")
    loose = check_model(make_model(), batches(), step, tolerance=10.0)
    assert not loose.bitwise
    assert "to rounding" in str(loose)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="Sequential has no training_step: give check_model a step"):
        check_model(make_model(), batches())
    with pytest.raises(ConfigurationError, match="check_model got no batch"):
        check_model(make_model(), [], step)
    with pytest.raises(ConfigurationError, match=r"stages=0 must be a whole.*\n.*updates=-1 must be a whole number, 1"):
        check_model(make_model(), batches(), step, stages=0, updates=-1)
    with pytest.raises(ConfigurationError, match=r"stages=2\.0 must be a whole number"):
        check_model(make_model(), batches(), step, stages=2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="micro_batches=1 is smaller than the number of stages"):
        check_model(make_model(), batches(), step, micro_batches=1)
    with pytest.raises(ConfigurationError, match="fewer than the 20 stages"):
        check_model(make_model(), batches(), step, stages=20)


class DecaysByPosition(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [p], "lr": 0.05 / (1 + i)} for i, p in enumerate(self.parameters())])


class DecaysByName(Net):
    def configure_optimizers(self) -> Any:
        named = self.model.named_parameters()
        return torch.optim.SGD([{"params": [p], "lr": 0.05 / (1 + int(name[0]))} for name, p in named])


def test_groups_that_depend_on_the_cut() -> None:
    batches = [{"x": torch.randn(8, DIM), "y": torch.randn(8, 1)}]
    assert check_model(DecaysByName(Run(DecaysByName)), batches, stages=3).ok
    with pytest.raises(ConfigurationError, match="goes by the position or the number of parameters"):
        check_model(DecaysByPosition(Run(DecaysByPosition)), batches, stages=3)


class TiedNet(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = make_model(tied=True)

    def configure_optimizers(self) -> Any:
        return MuonAdamW(self.named_parameters(), lr=0.02)


def test_groups_of_shared_weights() -> None:
    batches = [{"x": torch.randn(8, DIM), "y": torch.randn(8, 1)}]
    assert check_model(TiedNet(Run(TiedNet)), batches, stages=2).ok


# -- arguments of the model ---------------------------------------------------------------------------------------


class KeywordModel(nn.Module):
    """Takes its input by name, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def pipeline_layers(self) -> list[Any]:
        return [(self.first, lambda first, inputs_embeds, lock=None: first(inputs_embeds)), self.second]

    def forward(self, inputs_embeds: Tensor, lock: Any = None) -> Tensor:
        return apply_layers(self, inputs_embeds=inputs_embeds, lock=lock)


def test_an_argument_that_requires_a_gradient_is_named() -> None:
    def embedding(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        embeds = batch["x"] * model.get_parameter("first.weight").sum(0)
        return F.mse_loss(model(inputs_embeds=embeds), batch["y"])

    with pytest.raises(ConfigurationError, match=r"argument of the model\(...\) requires a gradient \(inputs_embeds: "):
        check_model(KeywordModel(), batches(), embedding, stages=2)


def test_an_argument_that_cannot_be_copied_is_named() -> None:
    def locked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"], lock=threading.Lock()), batch["y"])

    with pytest.raises(ConfigurationError, match=r"an argument of the model\(...\), lock, is a lock that cannot be"):
        check_model(KeywordModel(), batches(), locked)


def test_a_branch_that_only_a_later_micro_batch_takes() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        return model.second(model.first(x if x.sum() < 100 else x.clamp(max=1)))

    given = batches(8, 8)
    given[1]["x"][-1] = 100.0
    assert check_model(Forward(forward), given[:1], step, micro_batches=4).bitwise
    with pytest.raises(
        ConfigurationError, match="are not the same with micro-batch 3 of batch 1: their outputs differ"
    ):
        check_model(Forward(forward), given, step, micro_batches=4)
