"""Forwards of all sorts: what can be cut is cut right, and the rest is refused with what is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, apply_layers, check_model, pipelined
from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.core.cut.units import pipeline_units
from tests.adapt.models import Trained

DIM = 8


class Block(nn.Module):
    """A layer of others."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Dropout(dropout)

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        return x + scale * self.dropout(torch.tanh(self.linear(self.norm(x)))) + sum(m for m in more if m is not None)


class Net(nn.Module):
    """Blocks in a row; others differ in what is around them."""

    def __init__(self, dropout: float = 0.0, count: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(count))
        self.out = nn.Linear(DIM, 1)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, count))
        self.mix = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))
        self.between = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Skipping(Net):
    """What the entry gives goes to every block, and to the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x, first)
        return self.out(x + first)


class Mixed(Net):
    """Parameters of the model itself between blocks, as in nanochat."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = self.scales[i] * x + self.mix[i] * first
            x = block(x)
        return self.out(x)


class Positioned(Net):
    """Positions, computed from a parameter, are added in front of every block."""

    def forward(self, x: Tensor) -> Tensor:
        positions = self.scales.tanh().mean()
        x = self.entry(x)
        for block in self.blocks:
            x = block(x + positions)
        return self.out(x) * positions


class Between(Net):
    """Modules between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for between, block in zip(self.between, self.blocks):
            x = block(torch.tanh(between(x)))
        return self.out(x)


class Ladder(Net):
    """As in a U-Net: what early blocks gave comes to late ones."""

    def __init__(self, dropout: float = 0.0, count: int = 5) -> None:
        super().__init__(dropout, count)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.entry(x), []
        for i, block in enumerate(self.blocks):
            if i > len(self.blocks) // 2:
                x = x + kept.pop()
            x = block(x)
            kept.append(x) if i < len(self.blocks) // 2 else None
        return self.out(x)


class InPlace(Net):
    """Changes in place what blocks gave."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
            x += 0.5
        return self.out(x.mul_(2.0))


class Scaled(Net):
    """Every block gets other numbers, and one a tensor that only it gets."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(DIM, dtype=x.dtype)
        x = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = block(x, positions.sin() if i == 1 else None, scale=1.0 / (i + 1))
        return self.out(x)


class Tied(Net):
    """The entry's weight is used once more behind the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(nn.functional.linear(x, self.entry.weight))


class Sized(Net):
    """Reads shapes and dtypes of weights that are elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x.to(self.entry.weight.dtype))
        for block in self.blocks[: len(self.blocks)]:
            x = block(x, scale=1.0 / block.norm.normalized_shape[0])
        return self.out(x) / self.entry.weight.shape[0] + self.blocks[0].linear.weight.numel()


class Embedded(Net):
    """Its head has parts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.dropout = nn.Dropout(dropout)
        self.token = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.entry(x) + self.token)
        for block in self.blocks:
            x = block(x)
        return self.out(self.dropout(x))


class Unused(Net):
    """Has parameters that its forward does not use: mix, scales and between of them all; here an entry, too."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Noted(Net):
    """The code between blocks keeps what they gave in them, and reads it behind them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
            block.kept = x.mean()
        return self.out(x) + sum(block.kept for block in self.blocks)


FORWARDS = (Net, Skipping, Mixed, Positioned, Between, Ladder, InPlace, Scaled, Tied, Sized, Embedded, Unused, Noted)


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FORWARDS)
def test_trains_as_a_single_process_does(kind: type[Net], dropout: float) -> None:
    torch.manual_seed(1)
    model = pipelined(kind(dropout), (torch.randn(2, DIM),))
    x = torch.randn(5, DIM)
    with torch.no_grad():
        assert torch.equal(apply_layers(model.eval(), x), model(x))
    model.train()
    batches = [{"x": torch.randn(4, DIM)} for _ in range(2)]
    for stages in (3, 1):
        report = check_model(Trained(model), batches, stages=stages, micro_batches=4, updates=3)
        assert report.bitwise, str(report)


def test_nothing_travels_that_nobody_needs() -> None:
    """Of plain blocks in a row the one tensor between two of them."""
    model, carried = pipelined(Net(), (torch.randn(2, 3, DIM),)), torch.randn(5, 3, DIM)
    for unit in pipeline_units(model)[:-1]:
        carried = unit.apply((carried,), {})
        assert [tuple(tensor.shape) for tensor in tensors_of(carried)] == [(5, 3, DIM)], unit.name


def test_where_it_may_be_cut() -> None:
    units = [unit.name for unit in pipeline_units(pipelined(Between(), (torch.randn(2, DIM),)))]
    assert units == ["entry + between.0", "blocks.0", "between.1", "blocks.1", "between.2", "blocks.2", units[-1]]
    costs = pipelined(Net(), (torch.randn(2, DIM),)).pipeline_costs()
    assert costs[0] == costs[1] == costs[2] > costs[4] > 1.0, "entry, blocks and out have such products of matrices"


class Asking(Net):
    """Asks modules that may be elsewhere for dtypes, and in which mode they are."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x.to(self.entry.weight.dtype))
        for block in self.blocks:
            x = block(x.to(block.linear.weight.dtype)) * (2.0 if block.training else 1.0)
        return self.out(x.to(self.out.bias.dtype)) + self.entry.weight.dtype.itemsize


def test_what_changes_after_the_call_is_noticed() -> None:
    """A Trainer converts the weights (``precision="bf16-true"``), and switches modes."""
    x = torch.randn(4, DIM)
    model = pipelined(Asking(), (x,))
    for changed in (model.double(), model.eval(), model.bfloat16().train(), model.float()):
        found, expected = apply_layers(changed, x), changed(x)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


class Keeping(Block):
    """Leaves something behind."""

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        self.kept = x.mean()
        return super().forward(x)


class Routed(Net):
    """Reads what its blocks leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x) + sum(block.kept for block in self.blocks)


class Repeated(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.out(x)


class OneOfAll(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 1 if x.abs().mean() < 100 else None]:
            x = block(x)
        return self.out(x)


class Backwards(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):  # type: ignore[call-overload]
            x = block(x)
        return self.out(x)


class Borrower(Block):
    """Uses a weight that is not its own."""

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        return super().forward(x) + self.borrowed[0].sum()


class Borrowing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Borrower() for _ in range(3))
        for block in self.blocks:
            block.borrowed = [self.entry.weight]  # type: ignore[assignment]


class Holder(float):
    """Of somebody's class."""


class WithObject(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=Holder(1.0))
        return self.out(x)


def replaced() -> nn.Module:
    model = Net()
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


class Alone(nn.Module):
    """Has nothing to cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Again(Net):
    """What has most of the weights runs twice."""

    def __init__(self) -> None:
        super().__init__(count=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.out(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "left behind": (Routed, {}, r"the code of Routed behind its layer blocks\.2 comes to other results"),
    "borrowed": (Borrowing, {}, r"layer blocks\.0 uses a parameter that it does not hold"),
    "object": (WithObject, {}, r"argument 'blocks\.0\.scale' is a Holder, which cannot cross a cut"),
    "repeated": (Repeated, {}, r"found in Repeated: .* its lists are .* blocks: the forward called blocks\.0 3 times"),
    "asked for": (Repeated, {"blocks": "blocks"}, r"blocks: the forward called blocks\.0 3 times\. Have the forward"),
    "as data say": (OneOfAll, {}, "blocks: the forward called 1 of its 3 layers; .* Have the forward call each"),
    "backwards": (Backwards, {}, "blocks: the forward called its layers in another order"),
    "one layer": (lambda: Alone(), {}, r"found in Alone: .* Name those to cut between with pipelined\(..., blocks="),
    "mostly repeated": (Again, {}, "no layers were found in Again: .* with most of the weights"),
    "replaced": (replaced, {}, "forward of this Net was replaced in the object"),
    "on meta": (lambda: Net().to("meta"), {}, "Net is on the meta device"),
    "not a list": (Net, {"blocks": "entry"}, r"blocks=\['entry'\]: not a ModuleList .* there are \['blocks'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, options, problem = REFUSED[name]
    model = make()
    with pytest.raises(ConfigurationError, match=problem):
        pipelined(model, (torch.randn(2, DIM),), **options)
    assert not hasattr(model, "pipeline_layers")


class Pair(Net):
    def forward(self, x: Tensor, y: dict[str, Tensor]) -> Tensor:
        return super().forward(x + y["y"])


def test_no_example_is_known() -> None:
    with pytest.raises(ConfigurationError, match=r"not known how Pair is called \(tried: .*\); give an example"):
        pipelined(Pair())


class Switched(Net):
    """Code behind the blocks that the example does not run."""

    def forward(self, x: Tensor, twice: bool = False, more: Tensor | None = None) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        x = x if more is None else x + more
        return self.out(x * 2 if twice else x)


def test_a_call_that_is_not_the_examples_is_refused() -> None:
    model, x = pipelined(Switched(), (torch.randn(2, DIM),)), torch.randn(2, DIM)
    apply_layers(model, x, twice=False)
    with pytest.raises(ConfigurationError, match="Switched was called with twice=True in the example"):
        apply_layers(model, x, twice=True)
    model = pipelined(Switched(), {"x": x, "twice": True})
    assert torch.equal(apply_layers(model, x=x, twice=True), model(x, twice=True))


def test_tensors_may_come_or_not_by_position_or_by_name() -> None:
    """The example has others; a small one is needed at the end alone, a large one, x, at the beginning."""
    x, more = torch.randn(2, 3, DIM), torch.randn(2, 3, DIM)
    for example in ((x,), {"x": x, "more": more}, (x, False, more), {"more": more, "x": x}):
        model = pipelined(Switched(), example)
        for args, kwargs in (
            ((x,), {}),
            ((x, False, more), {}),
            ((x,), {"more": more}),
            ((), {"more": more, "x": x}),
            ((), {"x": x, "twice": False, "more": more}),
            ((), {"x": x, "more": x}),
        ):
            assert torch.equal(apply_layers(model, *args, **kwargs), model(*args, **kwargs))


class Optional(Net):
    """A mask with which the code at its end takes what came first."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x if weight is None else x + weight * first)


def test_a_tensor_with_which_code_runs_that_the_example_did_not() -> None:
    """What it takes besides is on another stage: that is said, and an example helps."""
    x, weight = torch.randn(2, DIM), torch.rand(2, 1)
    with pytest.raises(ConfigurationError, match="computes the model's output from what entry returned"):
        apply_layers(pipelined(Optional(), (x,)), x, weight=weight)
    model = pipelined(Optional(), (x, weight))
    assert torch.equal(apply_layers(model, x, weight=weight), model(x, weight))
    assert torch.equal(apply_layers(model, x), model(x))


class Choosing(Net):
    """Decides by values of its small input, which are other ones in the example."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        h = self.entry(x)
        for block in self.blocks:
            h = block(h)
        return self.out(torch.where((c > 0)[:, None], h * 2, h))


def test_values_that_decide_travel() -> None:
    model = pipelined(Choosing(), (torch.randn(2, DIM), -torch.ones(2)))
    x, c = torch.randn(4, DIM), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert torch.equal(apply_layers(model, x, c), model(x, c))


def test_a_forward_that_takes_another_way() -> None:
    class Early(Net):
        way = 3

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[: self.way]:
                x = block(x)
            return self.out(x)

    model = pipelined(Early(), (torch.randn(2, DIM),))
    model.way = 2
    with pytest.raises(ConfigurationError, match=r"came to out where it came to blocks\.2 with the example"):
        apply_layers(model, torch.randn(2, DIM))


class ByLength(Net):
    """Does more with longer batches, where it chooses from what it may not need."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(torch.where(torch.ones(DIM) > 2 * (len(x) < 4), first, x))


def test_a_choice_that_comes_out_otherwise_than_with_the_example() -> None:
    """It was NaN."""
    model = pipelined(ByLength(), (torch.randn(2, DIM),))
    with pytest.raises(ConfigurationError, match=r"computes the model's output from what entry returned, .* give an"):
        apply_layers(model, torch.randn(8, DIM))
    assert torch.equal(apply_layers(model, torch.randn(2, DIM) * float("nan")).isnan(), torch.ones(2, 1) == 1)
    model, x = pipelined(ByLength(), (torch.randn(8, DIM),)), torch.randn(24, DIM)
    assert torch.equal(apply_layers(model, x), model(x))
    report = check_model(Trained(model), [{"x": x}], stages=3, micro_batches=3)
    assert report.ok, str(report)


class ByType(Net):
    """Looks at its blocks: by their class they are those of the model, by their type they are not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x) + float(isinstance(block, Block))
            x = x * 2 if len(x) > 2 and type(block) is Block else x
        return self.out(x)


def test_another_forward_than_with_the_example_is_told_with_what_to_do() -> None:
    """Nobody who calls pipelined() has written pipeline_layers()."""
    model = pipelined(ByType(), (torch.randn(2, DIM),))
    assert torch.equal(apply_layers(model, torch.ones(2, DIM)), model(torch.ones(2, DIM)))
    (difference,) = check_model(Trained(model), [{"x": torch.randn(8, DIM)}], stages=2).differences
    assert difference.comparison == "whole"
