"""Forwards that no pipeline can run are refused with the reason; ``check_model`` finds what the example hides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, check_model, pipelined
from tests.adapt.nets import DIM, SHAPE, Block, Net
from tests.helpers.models import Trained, assert_trains


class KeepingBlock(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        self.kept = x.mean()
        return super().forward(x)


class Collecting(Net):
    """Network that reads attributes that its blocks set."""

    block = KeepingBlock

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.kept for block in self.blocks)


class Shuffling(Net):
    """Network that draws from Python's global generator before and after blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=random.random())
        return self.out(x) * random.random()


class Overwriting(Net):
    """Network whose backward fails, because an input that a norm saved is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * 2
        for block in self.blocks:
            x += block(x)
        return self.out(x)


class Evaluating(Net):
    """Network that uses the entry's output again, but only in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x if self.training else x + first)


class Infinite(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.nan


class Repeated(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.out(x)


_DIFFERS = r"^{} cannot be cut between its blocks blocks\.0 to blocks\.2 \({}\): "
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "left behind": (Collecting, {}, _DIFFERS.format("Collecting", "AttributeError: .* no attribute 'kept'")),
    "in evaluation": (Evaluating, {}, _DIFFERS.format("Evaluating", "its output differs")),
    "python's numbers": (Shuffling, {}, _DIFFERS.format("Shuffling", "its output differs")),
    "overwritten": (Overwriting, {}, _DIFFERS.format("Overwriting", "RuntimeError: .*modified by an inplace .*")),
    "not a number": (Infinite, {}, _DIFFERS.format("Infinite", "its output is NaN with the example: .*")),
    "repeated": (Repeated, {}, r"no layers were found in Repeated: .* \(the model has \['blocks', .* pipeline_layers"),
    "on meta": (lambda: Net().to("meta"), {}, "Net is on the meta device"),
    "not a list": (
        Net,
        {"blocks": "entry"},
        r"blocks=\['entry'\]: the model has no such ModuleList .* it has \['blocks'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, options, problem = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    before, names = str(vars(model)), list(model.state_dict())
    with pytest.raises(ConfigurationError, match=problem):
        pipelined(model, (torch.randn(SHAPE),), **options)
    assert not hasattr(model, "pipeline_layers")
    assert model.training
    assert (str(vars(model)), list(model.state_dict())) == (before, names), "it is left as it was"


# -- values whose use the example does not show -----------------------------------------------------------------------


class LongSkip(Net):
    """Network that adds the entry's output only for long sequences."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x + first if x.shape[1] > 4 else x)


class Late(Net):
    """Network that leaves out, for long sequences, blocks whose outputs the next stages need."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 1 if x.shape[1] > 4 else None]:
            x = block(x)
        return self.out(x)


def test_the_check_finds_it() -> None:
    """Training does not detect a skip that the example lacks, but ``check_model`` does; a longer example shows it."""
    torch.manual_seed(0)
    long = torch.randn(4, 7, DIM)
    model = pipelined(LongSkip(), (torch.randn(SHAPE),))
    report = check_model(Trained(model), [{"x": long}] * 2, stages=3, microbatches=4)
    right, found = report.differences[0].values
    assert abs(right - found) > 1e-3 * abs(right), str(report)
    assert_trains(pipelined(LongSkip(), (long,)), [{"x": long}] * 2)


def test_a_block_that_is_left_out_where_its_output_is_needed() -> None:
    model = pipelined(Late(), (torch.randn(SHAPE),))
    with pytest.raises(ConfigurationError, match=r"blocks\.1 was not called in this forward, .* call every block"):
        assert_trains(model, [{"x": torch.randn(4, 7, DIM)}])
