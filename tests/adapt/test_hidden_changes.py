"""What a forward does beside computing: it is done on the stages as well, or it is refused; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpp import ConfigurationError, apply_layers, check_model, pipelined
from lightning_asyncpp.adapt.gradients import gradients_of, other_gradient
from lightning_asyncpp.core.cut.units import pipeline_units
from tests.adapt import test_modes
from tests.adapt.models import Trained
from tests.adapt.test_forwards import DIM, Block, Net

SHORT, LONG = (2, 4, DIM), (2, 7, DIM)


def gradients(model: nn.Module, call: Callable[[], Any]) -> dict[str, Tensor | None]:
    model.zero_grad()
    call().square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(model: nn.Module, *args: Any) -> None:
    """Outputs and gradients are those of the model's own forward."""
    assert torch.equal(apply_layers(model, *args), model(*args))
    expected = gradients(model, lambda: model(*args))
    found = gradients(model, lambda: apply_layers(model, *args))
    for name, gradient in expected.items():
        theirs = found[name]
        assert (gradient is None) == (theirs is None), name
        assert gradient is None or theirs is None or torch.equal(gradient, theirs), name


class Frozen(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.out(x)


class Cast(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.training):
            for block in self.blocks:
                x = block(x)
        return self.out(x.float())


class Inferring(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        with torch.inference_mode(not torch.is_grad_enabled()):
            for block in self.blocks:
                x = block(x)
        return self.out(x)


class Flagging(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
        return super().forward(x, scale=scale), x.shape[1] > 5


class Flagged(Net):
    """What a block says decides what the next one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Flagging() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, is_long = self.entry(x), False
        for block in self.blocks:
            x, is_long = block(x, scale=0.5 if is_long else 1.0)
        return self.out(x)


class Hooked(Net):
    """Hooks of blocks change what they take and return, and were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.blocks[1].register_forward_hook(lambda _, args, output: output * 3)


class InPlace(Net):
    """Changes in place what layers returned, and needs it once more later, as U-Nets with ``ReLU(inplace=True)`` do."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.entry(x)
        first *= 2
        second = self.blocks[0](first)
        second += 1
        third = self.blocks[1](second).relu_()
        return self.out(self.blocks[2](third) + first + second + third)


class Masking(Net):
    """Changes an argument in place, once or on every call."""

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        numbers.add_(1)
        x = self.entry(x) * numbers[..., None]
        for block in self.blocks:
            x = block(x, numbers[..., None])
        return self.out(x) * numbers[..., None]


class Named(Net):
    """Takes strings and numbers that differ from batch to batch."""

    def forward(self, x: Tensor, names: list[str], length: int) -> Tensor:
        x = self.entry(x) * len(names)
        for block in self.blocks:
            x = block(x, scale=1.0 / length)
        return self.out(x) + sum(map(len, names))


@pytest.mark.parametrize("kind", [Frozen, Cast, Inferring, Flagged, Hooked])
def test_is_done_on_the_stages_as_well(kind: type[Net]) -> None:
    model = pipelined(kind(), (torch.randn(SHORT),))
    for mode in (True, False):
        for shape in (SHORT, LONG):
            assert_same(model.train(mode), torch.randn(shape))


@pytest.mark.parametrize("kind", [Frozen, Cast])
def test_trains_so(kind: type[Net]) -> None:
    model = pipelined(kind(), (torch.randn(SHORT),)).train()
    assert check_model(Trained(model), [{"x": torch.randn(4, 3, DIM)}], stages=3, micro_batches=4, updates=2).bitwise


def test_arguments_that_are_changed_in_place() -> None:
    model = pipelined(Masking(), (torch.randn(SHORT), torch.zeros(2, 4, dtype=torch.long)))
    x, numbers = torch.randn(SHORT), torch.randint(0, 9, (2, 4))
    expected = gradients(model, lambda: model(x, numbers.clone()))
    found = gradients(model, lambda: apply_layers(model, x, numbers.clone()))
    assert all(torch.equal(g, found[name]) for name, g in expected.items() if g is not None)  # type: ignore[arg-type]


def test_what_layers_returned_is_changed_in_place() -> None:
    """It was changed once more by each part of the code that came to it."""
    model, x = pipelined(InPlace(), (torch.randn(SHORT),)), torch.randn(LONG)
    assert torch.equal(apply_layers(model, x), model(x))
    assert not other_gradient(*(gradients_of(model, call(model, x)) for call in (InPlace.forward, apply_layers)))
    assert check_model(Trained(model.train()), [{"x": torch.randn(4, 3, DIM)}], stages=3, micro_batches=4).bitwise


def test_strings_and_numbers_may_differ_from_the_examples() -> None:
    model = pipelined(Named(), (torch.randn(SHORT), ["a", "bb"], 4))
    assert_same(model, torch.randn(LONG), ["a", "b", "ccc"], 7)


class Statistics(nn.Module):
    """Has a buffer that moves, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Statistics(), Statistics()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x))


def test_a_submodule_with_statistics_runs_once_in_a_forward() -> None:
    model = pipelined(Normalised(), (torch.randn(SHORT),))
    assert not model.first.mean.any(), "and pipelined() leaves no trace in it"
    assert not model.last.mean.any()
    assert check_model(Trained(model.train()), [{"x": torch.randn(4, 3, DIM)}], stages=3, micro_batches=4).bitwise


class Initialised(Net):
    """Sets itself up by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.ready = 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.shift, self.ready = float(x.mean()), True
        return super().forward(x - self.shift)


def test_the_example_sets_nothing_up() -> None:
    model = pipelined(Initialised(), (torch.randn(SHORT) + 5,))
    assert (model.shift, model.ready) == (0.0, False)


class Scaled(Net):
    """Takes a number and a switch that may be left out."""

    def forward(self, x: Tensor, scale: float = 1.0, *, is_plain: bool = True) -> Tensor:
        return super().forward(x * scale if is_plain else x)


def test_a_number_that_the_example_leaves_out() -> None:
    model, x = pipelined(Scaled(), (torch.randn(SHORT),)), torch.randn(LONG)
    assert_same(model, x, 0.5)
    assert torch.equal(apply_layers(model, x, scale=0.5, is_plain=True), model(x, 0.5))
    with pytest.raises(ConfigurationError, match="was called with is_plain="):
        apply_layers(model, x, is_plain=False)


class Weighed(Net):
    """Reads attributes of its blocks, and their modes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x) * block.weight if block.training else block(x)
        return self.out(x)


def test_attributes_and_modes_of_blocks_that_hooks_set_later() -> None:
    """What they were when the model was cut was kept."""
    model, x = pipelined(Weighed(), (torch.randn(SHORT),)).train(), torch.randn(LONG)
    units = pipeline_units(model)
    model.blocks[0].weight, model.blocks[1].weight = 0.5, 2.0
    model.blocks[1].eval()
    found = x
    for unit in units:
        found = unit.apply((found,), {})
    assert torch.equal(found, model(x))


class Shared(Net):
    """One mask, drawn in front of the blocks, for all of them and the code behind them; what came first is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Bilinear(DIM, DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        order = torch.randperm(x.shape[1]) if self.training else torch.arange(x.shape[1])
        seen = self.factor(mask, mask * order[:, None])
        x = self.entry(x)
        for block in self.blocks:
            x = block(x * 1.1, mask)
        return self.out(x)[:, order], seen, self.factor(mask, mask * order[:, None])


def test_random_numbers_are_drawn_once() -> None:
    model = pipelined(Shared(), (torch.randn(SHORT),)).train()
    seen = []
    for stage_seed in (1, 2):
        carried: tuple = (torch.ones(LONG),)
        for number, unit in enumerate(pipeline_units(model)):
            torch.manual_seed(stage_seed * 100 + number)  # as on stages, which know nothing of each other's generators
            carried = (unit.apply(carried, {}),)
        _, first, last = carried[0]
        assert torch.equal(first, last)
        seen.append(first)
    assert not torch.equal(*seen)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 1000 else 0.5)


class Averaging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().forward(x - self.mean)


class Remembering(Net):
    """Adds what the call before came to."""

    before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else x + self.before
        for block in self.blocks:
            x = block(x)
        self.before = torch.ones(DIM)
        return self.out(x)


class Telling(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        self.length = x.shape[1]
        return super().forward(x)


class Told(Net):
    """Reads a number that its blocks leave in them, which was the same for the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Telling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(block.length for block in self.blocks)


class AddedLoss(torch.autograd.Function):
    """Shows in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones(())


class WithLoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        loss = x.square().mean()
        for block in self.blocks:
            x = block(x)
        return AddedLoss.apply(self.out(x), loss)


class Scaling(Net):
    """Scales gradients between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.out(x)


class KeepingMean(Net):
    """Keeps what it changes in place in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return super().forward(x)


class Collected(Net):
    """Counts in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [KeepingMean, Collected])
def test_who_is_refused_is_left_as_it_was(kind: type[Net]) -> None:
    """It counted in every run, and mixed in what stands for values."""
    model, fresh = kind(), kind()
    with pytest.raises(ConfigurationError, match=r"changes (mean|counts) around its layers, each time that it runs"):
        pipelined(model, (torch.randn(SHORT),))
    assert str(vars(model)) == str(vars(fresh)) or torch.equal(model.mean, fresh.mean)


class Recomputed(Net):
    """Drops out in a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return checkpoint(self.end, x, use_reentrant=False)

    def end(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(x, 0.5, self.training))


REFUSED = {
    Recomputed: "forward of Recomputed draws random numbers in a torch\\.utils\\.checkpoint around its layers",
    Counting: "forward of Counting changes calls around its layers, each time that it runs",
    Averaging: "forward of Averaging changes mean around its layers",
    Remembering: "forward of Remembering computes with what the forward before left in before",
    Told: r"the code of Told behind its layer blocks\.2 comes to other results",
    WithLoss: r"WithLoss, cut into layers, gives another gradient of \S+ than its own forward",
    Scaling: r"hangs a hook on a gradient \(register_hook\)",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: type[Net]) -> None:
    model = kind()
    with pytest.raises(ConfigurationError, match=REFUSED[kind]):
        pipelined(model, (torch.randn(SHORT),))
    assert not hasattr(model, "pipeline_layers")


class Halving(Block):
    """Shortens what is long."""

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        x = super().forward(x, scale=scale)
        return x[:, ::2] if x.shape[1] > 4 else x


class Sized(Net):
    """What a block takes follows from the shape of what the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halving() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x, scale=1.0 / x.shape[1])
        return self.out(x)


class Optional(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
        return super().forward(x), x.mean() if x.shape[1] > 4 else None


class Sometimes(test_modes.Told):
    """Its blocks return a second value for long batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(3))


class LongSkip(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x + first if x.shape[1] > 4 else x


class Rest(Net):
    """Takes what is beyond the example's length."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x + first[:, 4:].sum(1, keepdim=True))


class Reentrant(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if x.shape[1] > 4 else block(x)
        return self.out(x)


class Changing(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            x += 1.0
        return super().forward(x)


OTHERWISE = {
    Sized: r"blocks\.0 returned torch\.float32 \[2, 4, 8\] for torch\.float32 \[2, 7, 8\], and with the example",
    Sometimes: r"blocks\.0 returned something else than with the example",
    LongSkip: "computes the model's output from what entry returned, but that is on another pipeline stage",
    Rest: "computes the model's output from what entry returned, but that is on another pipeline stage",
    Reentrant: r"calls blocks\.0 in a torch\.utils\.checkpoint with use_reentrant=True",
    Changing: "forward of Changing changes its arguments in place, which it did not with the example",
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_is_another_with_other_batches_is_refused_there(kind: type[Net]) -> None:
    model = pipelined(kind(), (torch.randn(SHORT),))
    assert_same(model, torch.randn(SHORT))
    with pytest.raises(ConfigurationError, match=OTHERWISE[kind]):
        apply_layers(model, torch.randn(LONG))
    assert_same(model, torch.randn(SHORT))


def test_layers_that_were_removed() -> None:
    model = pipelined(Net(), (torch.randn(2, DIM),))
    del model.blocks[2]
    with pytest.raises(ConfigurationError, match=r"blocks\.2: no longer in the Net that pipelined\(\) was called with"):
        apply_layers(model, torch.randn(2, DIM))


class PutsInEval(Net):
    """A frozen part, in the way of transfer learning."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].eval()
        return super().forward(x)


def test_a_forward_that_sets_modes_is_refused_unless_they_are_so() -> None:
    with pytest.raises(ConfigurationError, match=r"puts blocks\.1 into evaluation mode, .* in __init__ instead"):
        pipelined(PutsInEval(), (torch.randn(2, DIM),))
    model = PutsInEval()
    model.blocks[1].eval()
    pipelined(model, (torch.randn(2, DIM),))
    assert not model.blocks[1].training
    assert model.blocks[0].training


class Padded(nn.Module):
    """torch packs padding in evaluation, for which it asks the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, DIM), nn.Linear(DIM, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True), 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))


def test_padding_in_an_evaluation_without_gradients() -> None:
    model = pipelined(Padded()).eval()
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 1, 2, 3]])
    with torch.no_grad():
        expected, found = Padded.forward(model, tokens), apply_layers(model, tokens)
    real = tokens != 0
    assert torch.allclose(found[real], expected[real], atol=1e-6)
