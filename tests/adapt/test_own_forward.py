"""A ``forward`` that does more than its layers is found where a training starts, or said not to have been compared."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import apply_layers, pipelined
from lightning_asyncpp.adapt import problems_of_layers
from tests.adapt.test_forwards import DIM, Net
from tests.core.cases import DIM as INPUT
from tests.trainer.failures.test_mistakes import assert_refused, refusals
from tests.trainer.pool import Pools
from tests.trainer.runs import Net as Module
from tests.trainer.runs import Run, fit_and_hear

EXAMPLE = (torch.randn(2, DIM),)


class Layers(Net):
    """Says its layers, and leaves its forward as it was, which is the same."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        del self.scales, self.mix, self.between  # which no layer holds

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.entry, *self.blocks, self.out]


class Skips(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x + first)


class Scales(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.9


class Applies(Layers):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return apply_layers(self, *args, **kwargs)


class Tokens(Skips):
    """Begins with an embedding, so that it is known what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Embedding(7, DIM)  # type: ignore[assignment]


class Pair(Skips):
    """Takes what nobody guesses."""

    def forward(self, x: Tensor, y: dict[str, Tensor]) -> Tensor:
        return super().forward(x + y["y"])


class Draws(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(())


@pytest.mark.parametrize(
    "make",
    [Layers, Applies, lambda: nn.Sequential(nn.Linear(DIM, DIM)), lambda: pipelined(Net(), EXAMPLE)],
)
def test_nothing_is_said(make: Any) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not problems_of_layers(model.train(), EXAMPLE)
    assert model.training
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "example"), [(Skips, EXAMPLE), (Scales, EXAMPLE[0]), (Tokens, None)])
def test_another_forward_is_refused(kind: type[nn.Module], example: Any) -> None:
    (problem,) = problems_of_layers(kind(), example, "self.net")
    assert f"self.net: forward of {kind.__name__} gives something else" in problem


@pytest.mark.parametrize(("kind", "example"), [(Pair, None), (Skips, (torch.randn(2, 3),)), (Draws, EXAMPLE)])
def test_what_cannot_be_compared_is_said(kind: type[nn.Module], example: Any) -> None:
    with pytest.warns(match=r"was not compared\. Let forward be"):
        assert not problems_of_layers(kind(), example)


class Projection(nn.Module):
    """No layer of torch's, of which it were known what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUT, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class WithSkip(Module):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = Skips()
        self.model.entry = Projection()


class WithExample(WithSkip):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.example_input_array = torch.randn(2, INPUT)


def test_at_the_start_of_a_training(pools: Pools) -> None:
    assert_refused(refusals(pools, Run(WithExample)), "forward of Skips gives something else than its layers")
    heard = [texts for _, texts in pools.run(2, fit_and_hear, Run(WithSkip), "was not compared")]
    assert [len(texts) for texts in heard] == [1, 0], "by rank 0 alone"


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Unknown(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float("nan")


@pytest.mark.parametrize("kind", [InPlace, Unknown])
def test_arguments_stay_as_they_are_and_nan_is_a_difference(kind: type[nn.Module]) -> None:
    example = torch.ones(2, DIM)
    (problem,) = problems_of_layers(kind(), example)
    assert "gives something else" in problem
    assert torch.equal(example, torch.ones(2, DIM))
