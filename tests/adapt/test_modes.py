"""Code around blocks that runs in training alone, or in evaluation alone, is cut as the rest; so is what it draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, apply_layers, check_model, pipelined
from lightning_asyncpp.adapt.draws import SameDraws, host_as_before
from lightning_asyncpp.core.cut.units import pipeline_units
from tests.adapt.models import Trained
from tests.adapt.test_forwards import DIM, Block, Net

SHAPE = (4, 3, DIM)


class Dropping(Net):
    """Stochastic depth: what a block gives is left out of some samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = self.drop(block(x))
        return self.out(x)

    def drop(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1) > 0.3) if self.training else x


class Choosing(Net):
    """The same with a choice, which for the few samples of an example may fall on one side alone."""

    def __init__(self, kept: float = 0.8) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = self.chosen(block(x), x)
        return self.out(self.chosen(x, first))

    def chosen(self, x: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where(torch.rand(len(x), 1, 1) < self.kept, x, otherwise) if self.training else x


class Noisy(Net):
    """Noise in front of the blocks, and once more behind them."""

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.1 * torch.randn_like(x) if self.training else torch.zeros_like(x)
        x = self.entry(x + noise)
        for block in self.blocks:
            x = block(x)
        return self.out(x + noise)


class Auxiliary(Net):
    """A head and a weight that training alone uses, of what a block in the middle gave."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.factor = nn.Linear(DIM, 1), nn.Parameter(torch.full((), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.training and i == 1:
                middle = x
        if self.training:
            return self.out(x) + self.factor * self.head(middle) + first.mean()
        return self.out(x)


class Evaluating(Net):
    """Does more in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x) if self.training else 0.5 * block(x)
        return self.out(x if self.training else x + first)


class Talking(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
        x = super().forward(x)
        return (x, x.square().mean()) if self.training else (x, None)


class Told(Net):
    """Blocks return another value in training, which is for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Talking() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.entry(x), torch.zeros(())
        for block in self.blocks:
            x, more = block(x)
            total = total if more is None else total + more
        return self.out(x) + total


class Shuffling(Net):
    """Draws Python's and NumPy's numbers before and between blocks, and uses them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffled = Shuffled()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        order, mask = list(range(x.shape[1])), torch.ones(x.shape[1])
        if self.training:
            random.shuffle(order)
            mask = torch.as_tensor(np.random.rand(x.shape[1]) > 0.5, dtype=x.dtype)
        x = self.shuffled(self.entry(x[:, order]) * mask[:, None])
        for block in self.blocks:
            x = block(x, scale=random.random() if self.training else 1.0)
        drawn = torch.tensor([*mask.tolist(), *map(float, order), random.random()])
        return self.out(x[:, order]), drawn


class Shuffled(nn.Module):
    """Draws numbers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1.0 + random.random())


KINDS = (Dropping, Choosing, Noisy, Auxiliary, Evaluating, Told, Shuffling)


@pytest.mark.parametrize("kind", KINDS)
def test_is_what_forward_does_in_both_modes(kind: type[Net]) -> None:
    torch.manual_seed(0)
    model, x = pipelined(kind(), (torch.randn(2, 4, DIM),)), torch.randn(SHAPE)
    blocks = [f"blocks.{i}" for i in range(3)]
    for mode in (True, False):
        model.train(mode)
        results = []
        for call in (model, lambda x: apply_layers(model, x)):
            with SameDraws(model, blocks):
                results.append(call(x))
        for expected, found in zip(*(r if isinstance(r, tuple) else (r,) for r in results)):
            assert torch.equal(expected, found)


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_a_single_process_does(kind: type[Net]) -> None:
    torch.manual_seed(1)
    model = pipelined(kind(), (torch.randn(2, 4, DIM),)).train()
    for stages in (3, 1):
        batches = [{"x": torch.randn(SHAPE)} for _ in range(2)]
        assert check_model(Trained(model), batches, stages=stages, micro_batches=4, updates=3).bitwise


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.99])
def test_what_random_numbers_may_choose_is_there(kept: float) -> None:
    torch.manual_seed(0)
    model, x = pipelined(Choosing(kept), (torch.randn(2, 4, DIM),)).train(), torch.randn(SHAPE)
    for _ in range(20):
        assert apply_layers(model, x).isfinite().all()


def test_numbers_of_python_and_numpy_are_drawn_once() -> None:
    """On stages, which know nothing of each other's generators; theirs are left as they were."""
    model, seen = pipelined(Shuffling(), (torch.randn(2, 4, DIM),)).train(), []
    for seed in (1, 2, 1):
        carried: tuple = (torch.ones(SHAPE),)
        for number, unit in enumerate(pipeline_units(model)):
            torch.manual_seed(seed * 100 + number)
            with host_as_before():
                random.seed(number + len(seen))
                np.random.seed(number + len(seen))
                states = random.getstate(), str(np.random.get_state())
                carried = (unit.apply(carried, {}),)
                assert states == (random.getstate(), str(np.random.get_state()))
        seen.append(carried[0])
    for first, again in zip(seen[0], seen[2]):
        assert torch.equal(first, again), "whatever Python and NumPy drew there before"
    order = seen[0][1][3:6].long()
    torch.manual_seed(100)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert not torch.equal(seen[0][1], seen[1][1])


def test_who_draws_none_pays_nothing() -> None:
    for kind, expected in ((Net, False), (Noisy, False), (Shuffling, True)):
        layers = pipelined(kind(), (torch.randn(2, 4, DIM),)).pipeline_layers
        assert [layers.programs[mode].draws_on_host for mode in (True,)] == [expected]


class Given(Net):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = [torch.Generator()]

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 + torch.rand((), generator=self.generator[0])
        x = self.entry(x) * factor
        for block in self.blocks:
            x = block(x)
        return self.out(x) / factor


def test_a_generator_of_the_models_own() -> None:
    """It was drawn from once more on every stage."""
    model = pipelined(Given(), (torch.randn(SHAPE),)).train()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
        model.entry.bias.zero_()
        model.out.bias.zero_()
    x = torch.randn(SHAPE)
    assert torch.allclose(apply_layers(model, x), model.out(model.entry(x)), rtol=1e-4, atol=1e-5)


class Leaving(Net):
    """Leaves a layer out of some forwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = x if self.training and i == 1 else block(x)
        return self.out(x)


class Collecting(Net):
    """In training it takes what a block leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(lambda block, args, output: setattr(block, "kept", output.mean()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.blocks[1].kept if self.training else 0.0)


REFUSED = {
    Leaving: "in training mode forward of Leaving does not call the same layers in the same order",
    Collecting: r"the code of Collecting behind its layer blocks\.2 comes to other results",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: type[Net]) -> None:
    model = kind()
    with pytest.raises(ConfigurationError, match=REFUSED[kind]):
        pipelined(model, (torch.randn(SHAPE),))
    assert not hasattr(model, "pipeline_layers")
    assert model.training


class Demanding(Net):
    """In training it takes what the example lacks."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        found = super().forward(x)
        return (found - targets.mean()) if self.training else found  # type: ignore[union-attr]


def test_a_model_that_takes_more_in_training() -> None:
    """What is known of its code is that of evaluation."""
    model, x, targets = pipelined(Demanding(), (torch.randn(SHAPE),)), torch.randn(SHAPE), torch.ones(2)
    assert torch.equal(apply_layers(model.train(), x, targets), model(x, targets))
    assert torch.equal(apply_layers(model.eval(), x), model(x))
