"""Ways to run a model with an example: as a whole, or its units one after the other as stages do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_asyncpp.adapt.examples import Call, copied
from lightning_asyncpp.core.batches.structure import flatten, unflatten
from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.core.cut.module_as_network import called_by_steps
from lightning_asyncpp.core.cut.own_forward import OwnForwardCut, OwnForwardStage
from lightning_asyncpp.core.cut.pruned import places_of
from lightning_asyncpp.core.cut.units import entering_units
from lightning_asyncpp.core.randomness import derive, random_states, seed_generators, set_random_states
from lightning_asyncpp.errors import ConfigurationError

_ROUNDING = 1e-3  # sums over several uses of a value may come in another order
_SEED = 0
Leaves = tuple[Tensor, ...]


@dataclass
class Result:
    """What one way to run the model gives; gradients by name."""

    output: Any
    gradients: dict[str, Tensor] = field(default_factory=dict)


class ModelRuns:
    """Runs a model; random numbers, buffers and attributes are the same at the beginning of every run.

    Args:
        model: in training or evaluation, as the user left it.
        call: arguments of an example.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model, self.call = model, call
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._modes = {module: module.training for module in model.modules()}

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Be in evaluation, or in training with those modules in evaluation that the user has put there."""
        for module, mode in self._modes.items():
            module.training = mode if training and self._modes[self.model] else training
        yield

    def forward(
        self, cut: OwnForwardCut, entered: Callable[[int], None], ended: Callable[[], None] = lambda: None
    ) -> Any:
        """Call the whole model; tell of each unit when its code begins, and of the end."""
        called = called_by_steps(self.model)
        args, kwargs = copied(*self.call)
        with self.one_run(), _entering_units(self.model, cut, entered):
            output = type(called).__call__(called, *args, **kwargs)
            ended()
            return output

    def costs(self, cut: OwnForwardCut) -> list[float]:
        """Floating-point operations of every unit; while they are counted, some functions round otherwise."""
        totals: list[int] = []
        with FlopCounterMode(display=False) as counter:  # which takes no parameters as arguments without gradients
            self.forward(cut, lambda _: totals.append(counter.get_total_flops()))
            edges = [*totals, counter.get_total_flops()]
        return [1.0 + after - before for before, after in itertools.pairwise(edges)]

    def in_stages(self, cut: OwnForwardCut) -> Result:
        """Run every unit as a stage, with its own weights alone."""
        links: list[tuple[tuple[Tensor, ...], Leaves]] = []
        value: Any = None
        for unit in range(cut.num_units):
            value = self.run_unit(cut, unit, value)
            if unit + 1 < cut.num_units:
                tensors, structure = flatten(value, cut.blocks[unit])
                value, gradients = received(tensors, structure)
                links.append((tensors, gradients))
        if not torch.is_grad_enabled():
            return Result(value)
        loss_of(value).backward()
        for tensors, gradients in reversed(links):
            backward(tensors, [gradients])
        return Result(value, self.take_gradients())

    def run_unit(self, cut: OwnForwardCut, unit: int, arrived: Any) -> Any:
        """Run one unit, as a stage that has nothing else, on what arrived there."""
        args, kwargs = copied(*self.call) if unit == 0 else ((arrived,), {})
        with self.one_run():
            return OwnForwardStage(self.model, cut, unit, unit + 1, self.device).run(args, kwargs, self.seed)

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """Begin with the same random numbers; buffers and attributes stay, also for backwards of earlier runs."""
        seed_generators(derive(_SEED, "before"), self.device)
        places = [place for module in self.model.modules() for place in places_of(module)]
        buffers = [place for place in places if not isinstance(place.tensor, nn.Parameter)]
        copies = {id(place.tensor): place.tensor.clone() for place in buffers}
        attributes = [(vars(module), dict(vars(module))) for module in map(called_by_steps, self.model.modules())]
        for place in buffers:
            place.table[place.key] = copies[id(place.tensor)]
        try:
            yield
        finally:
            for now, before in attributes:
                now.clear()
                now.update(before)
            for place in buffers:
                place.table[place.key] = place.tensor

    def seed(self, unit: int) -> None:
        """Begin the random numbers of a unit."""
        seed_generators(derive(_SEED, unit), self.device)

    def take_gradients(self) -> dict[str, Tensor]:
        """Name -> gradient, of the parameters that have one; they are taken away."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for parameter in self.model.parameters():
            parameter.grad = None
        return found


@contextmanager
def _entering_units(model: nn.Module, cut: OwnForwardCut, entered: Callable[[int], None]) -> Iterator[None]:
    """:func:`entering_units` of a model that is not cut so yet."""
    model.pipeline_layers = cut  # type: ignore[assignment]
    try:
        with entering_units(model, entered):
            yield
    finally:
        del model.pipeline_layers


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Leave attributes, buffers, gradients and random numbers as they were.

    Attention takes no fast path meanwhile, as on stages: it rounds otherwise.
    """
    modules = [(module, dict(vars(module))) for module in {*model.modules(), called_by_steps(model)}]
    tables = [(table, dict(table)) for module, _ in modules for table in (vars(module)["_buffers"],)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    states, fast = random_states(), torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for parameter, _, _ in parameters:
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        set_random_states(states)
        for module, attributes in modules:
            vars(module).clear()
            vars(module).update(attributes)
        for table, content in tables:
            table.clear()
            table.update(content)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, trains, gradient in parameters:
            parameter.requires_grad_(trains)
            parameter.grad = gradient


def received(tensors: Sequence[Tensor], structure: bytes) -> tuple[Any, Leaves]:
    """What the next stage gets, and leaves for what of it needs a gradient; layers may change it in place."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    fresh = [leaf.clone() for leaf in leaves]
    value = unflatten(fresh, structure) if structure or len(fresh) != 1 else fresh[0]
    return value, tuple(leaf for leaf in leaves if leaf.requires_grad)


def backward(tensors: Sequence[Tensor], leaves: Sequence[Leaves]) -> None:
    """Go on backwards from tensors, whose gradients are the sums of those that their leaves got."""
    ends = [tensor for tensor in tensors if tensor.requires_grad]
    found = [[leaf.grad for leaf in of_end if leaf.grad is not None] for of_end in zip(*leaves)]
    pairs = [(end, torch.stack(gradients).sum(0)) for end, gradients in zip(ends, found) if gradients]
    if pairs:
        torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])


def loss_of(output: Any) -> Tensor:
    """A sum over an output's entries, each with a weight of its own."""
    weighed = [
        (t * torch.linspace(0.5, 1.5, t.numel(), device=t.device).view(t.shape)).float().sum()
        for t in tensors_of(output)
        if t.is_floating_point() and t.requires_grad
    ]
    if not weighed:
        raise ConfigurationError("its output does not depend on its parameters, so nothing of it can be trained")
    return torch.stack(weighed).sum()


def difference(expected: Result, found: Result) -> str:
    """In words, if outputs differ at all, or gradients by more than rounding."""
    ours, theirs = list(tensors_of(found.output)), list(tensors_of(expected.output))
    if len(ours) != len(theirs) or not all(map(equal, ours, theirs)):
        return "another output"
    gradients = expected.gradients
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    for name in {**gradients, **found.gradients} if found.gradients else ():
        a, b = found.gradients.get(name), gradients.get(name)
        like = b if a is None else a
        if like is None or not like.numel():
            continue
        apart = (0 if a is None else a.double().nan_to_num()) - (0 if b is None else b.double().nan_to_num())
        if float(torch.as_tensor(apart).abs().max()) > _ROUNDING * max(float(like.abs().max()), 1e-3 * scale):
            return f"another gradient of {name}"
    return ""


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
