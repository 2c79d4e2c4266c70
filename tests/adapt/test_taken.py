"""Code around blocks goes on with a tensor that a block took, and does not make it a second time."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from lightning_asyncpp import apply_layers, check_model, pipelined
from lightning_asyncpp.adapt.gradients import gradients_of, other_gradient
from lightning_asyncpp.adapt.modes import MOST_RUNS
from tests.adapt.home_made import HOME_MADE, Pairs, tokens
from tests.adapt.models import Trained
from tests.adapt.test_forwards import DIM, Net


class Added(Net):
    """Sums behind each block, as in most transformers that are written at home."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * 2
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class InPlace(Net):
    """Has no gradient, as torch finds what a norm has kept changed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * 2
        for block in self.blocks:
            x += block(x)
        return self.out(x)


class WrittenInto(Net):
    """Without an assignment: the name stays that of the tensor that the block took."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * 2
        for block in self.blocks:
            y = block(x)
            x.add_(y)
        return self.out(x)


class HandedOn(Net):
    """Goes to the next block as well, and is joined with others, seen through a view, and returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.entry(x).tanh()
        half = first[:, : DIM // 2]
        second = self.blocks[0](first)
        third = self.blocks[1](second * 2, first)
        joined = torch.stack([first, third, torch.cat([half, half], 1)]).sum(0)
        return self.out(self.blocks[2](joined, first)), first


class Kept(Net):
    """Stays in an attribute until the forward is over."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x).tanh()
        for block in self.blocks:
            self.last = x
            x = block(x) * 2
            x = x - self.last
        return self.out(x)


@pytest.mark.parametrize("kind", [Added, InPlace, WrittenInto, HandedOn, Kept])
@pytest.mark.parametrize("training", [False, True])
def test_layers_give_what_forward_gives(kind: type[Net], training: bool) -> None:
    torch.manual_seed(0)
    model = pipelined(kind(), (torch.randn(2, DIM),)).train(training)
    for size in (2, 5):
        x = torch.randn(size, DIM)
        expected, found = kind.forward(model, x.clone()), apply_layers(model, x.clone())
        pairs = list(zip(expected, found)) if isinstance(expected, tuple) else [(expected, found)]
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        if kind not in (InPlace, WrittenInto):
            assert other_gradient(*(gradients_of(model, output) for output in (expected, found))) == ""


@pytest.mark.parametrize("kind", [Added, HandedOn])
def test_trains_as_a_single_process_does(kind: type[Net]) -> None:
    torch.manual_seed(0)
    report = check_model(Trained(kind(0.1)), [{"x": torch.randn(4, DIM)} for _ in range(3)], stages=3)
    assert report.bitwise, str(report)


def test_two_tensors_cross_between_sums_however_many_there_are() -> None:
    crossing = [pipelined(Added(count=count), (torch.randn(2, DIM),)).pipeline_layers.program for count in (4, 12)]
    assert [program.most_crossing() for program in crossing] == [2, 2]


class Dense(Net):
    """Every block takes what all before it returned."""

    def forward(self, x: Tensor) -> Tensor:
        found = [self.entry(x)]
        for block in self.blocks:
            found.append(block(sum(found)))
        return self.out(sum(value * i for i, value in enumerate(found)))


def test_many_results_that_cross_are_told() -> None:
    with pytest.warns(UserWarning, match=r"Dense puts together what its layers return .* up to 1\d of their results"):
        pipelined(Dense(count=11), (torch.randn(2, DIM),))
    make, batch, _ = HOME_MADE["unet"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipelined(make(), batch())


def test_code_between_many_layers_runs_a_few_times() -> None:
    """Some of the layers are part of that code."""
    model = pipelined(Pairs(count=9))
    assert len(model.pipeline_layers.program.blocks) == MOST_RUNS
    report = check_model(Trained(model), [{"x": tokens()} for _ in range(2)], stages=3)
    assert report.ok, str(report)


class Changing(Added):
    """Changes in place what a block took, where the example did not."""

    changes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * 2
        for block in self.blocks:
            y = block(x)
            if self.changes:
                x.mul_(0.5)
            x = x + y
        return self.out(x)


def test_what_the_example_left_alone_stays_alone() -> None:
    model = pipelined(Changing(), (torch.randn(2, DIM),))
    model.changes = True
    with pytest.raises(ValueError, match="changes what its layers took or returned in place"):
        apply_layers(model, torch.randn(2, DIM))
