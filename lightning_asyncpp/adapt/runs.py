"""Example arguments of models, and runs of a model with them: as a whole, or stage by stage."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.own_forward import OwnForwardCut, OwnForwardStage
from lightning_asyncpp.core.cut.units import entering_units
from lightning_asyncpp.core.randomness import seed_generators
from lightning_asyncpp.core.tree import flatten, map_tensors, tensors_of, unflatten
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.reference import uses_apart

Call = tuple[tuple, dict[str, Any]]
_BATCH, _TIME = 2, 8
_DIMENSIONS: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TOKEN_LABELS = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration")


def copied(args: tuple, kwargs: Mapping[str, Any]) -> Call:
    """Return copies of arguments, which the model may change in place."""
    return map_tensors(Tensor.clone, tuple(args)), map_tensors(Tensor.clone, dict(kwargs))


def examples_of(model: nn.Module) -> Iterator[Call]:
    """Yield candidate calls; for models of ``transformers``, calls with more arguments come first."""
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        yield from _of_transformers(model)
        return
    needed = _num_needed(model)
    for first in _first_arguments(model):
        # Further arguments: another sequence or image, or a class or a timestep per sample.
        for other in (first, torch.randint(2, (_BATCH,)), torch.rand(_BATCH)) if needed > 1 else (first,):
            yield (first, *[other] * (needed - 1)), {}


def _num_needed(model: nn.Module) -> int:
    """Return the number of positional arguments that a model requires."""
    parameters = list(inspect.signature(type(called_by_steps(model)).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters)


def _first_arguments(model: nn.Module) -> Iterator[Tensor]:
    """Yield candidate inputs: first timm's, then tokens, since submodules may be in any order, then other tensors."""
    known = getattr(model, "pretrained_cfg", None) or {}  # configuration in timm
    if "input_size" in known:
        yield torch.randn(_BATCH, *known["input_size"])
    firsts: dict[type, Any] = {}
    for module in model.modules():
        for kind in (nn.Embedding, nn.Linear, *_DIMENSIONS):
            if isinstance(module, kind):
                firsts.setdefault(kind, module)
    for kind, first in sorted(firsts.items(), key=lambda found: found[0] is not nn.Embedding):
        if kind is nn.Embedding:
            yield from (torch.randint(first.num_embeddings, (_BATCH, time)) for time in (_TIME, 2))
        elif kind is nn.Linear:
            yield from (torch.randn(*shape, first.in_features) for shape in ((_BATCH, _TIME), (_BATCH,)))
        else:
            sizes = (getattr(model, "image_size", 224), 224, 32)
            yield from (torch.randn(_BATCH, first.in_channels, *[size] * _DIMENSIONS[kind]) for size in sizes)


def _of_transformers(model: Any) -> Iterator[Call]:
    taken = inspect.signature(type(model).forward).parameters
    classes = {"labels": torch.zeros(_BATCH, dtype=torch.long)}
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 224)
        sizes = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = {"pixel_values": torch.randn(_BATCH, getattr(model.config, "num_channels", 3), *sizes)}
        yield (), {**pixels, **(classes if "labels" in taken else {})}
        yield (), pixels
        return
    tokens = torch.randint(1, int(getattr(model.config, "vocab_size", 0) or 2), (_BATCH, _TIME))  # (batch, time)
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    both = {"input_ids": tokens, "attention_mask": mask}
    decoder = {"decoder_input_ids": tokens} if getattr(model.config, "is_encoder_decoder", False) else {}
    if "labels" in taken or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        if any(sign in type(model).__name__ for sign in _TOKEN_LABELS):
            yield (), {**both, "labels": tokens.masked_fill(mask == 0, -100)}
        yield (), {**both, **classes}
    yield (), {**both, **decoder}
    yield (), {name: value[:1] for name, value in {"input_ids": tokens, **decoder}.items()}


_ROUNDING = 1e-3  # gradients of a value that is used several times may be added in another order


class Result(NamedTuple):
    """Result of a run of the model.

    Attributes:
        output: output of the model.
        gradients: for each unit (part of the model between two possible cuts), name of a parameter -> gradient. A run
            of the whole model has one mapping for the model, and one per further use of a shared parameter.
        crossing: for each unit, numbers (as in ``OwnForwardCut.crossing``) of received values that got a gradient. A
            run of the whole model has none.
    """

    output: Any
    gradients: list[dict[str, Tensor]]
    crossing: list[frozenset[int]]


class ModelRuns:
    """Runs of a model, all with the same initial random numbers, buffers and attributes.

    Args:
        model: model whose modules are in the user's training or evaluation modes.
        call: arguments of an example.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model, self.call = model, call
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._modes = {module: module.training for module in model.modules()}

    def train(self, training: bool) -> None:
        """Set evaluation or training mode; for training, restore the user's modes if the root was in training mode."""
        for module, mode in self._modes.items():
            module.training = mode if training and self._modes[self.model] else training

    def forward(self, cut: OwnForwardCut, entered: Callable[[int], None]) -> Any:
        """Call the whole model; call ``entered`` when each unit begins, and once more at the end."""
        called = called_by_steps(self.model)
        args, kwargs = copied(*self.call)
        self.model.pipeline_layers = cut  # type: ignore[assignment]
        with untouched(self.model), entering_units(self.model, entered):
            self.seed(-1)
            output = type(called).__call__(called, *args, **kwargs)
            entered(cut.num_units)
            return output

    def whole(self, cut: OwnForwardCut) -> Result:
        """Run the whole model forward and backward, with separate gradients for units that share a parameter."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.model.pipeline_layers = cut  # type: ignore[assignment]
        with uses_apart(self.model) as copies:
            output = self.forward(cut, self.seed)
            if torch.is_grad_enabled():
                _loss_of(output).backward()
        of_copies = [{names[parameter]: copy.grad} for parameter, copy in copies if copy.grad is not None]  # type: ignore[index]
        return Result(output, [self._take_gradients(), *of_copies], [])

    def in_stages(self, cut: OwnForwardCut, has_all: bool = False) -> Result:
        """Run every unit as a stage, forward and backward; without ``has_all``, a stage has only its unit's weights."""
        links: list[tuple[tuple[Tensor, ...], list[Tensor], bytes]] = []
        args, kwargs = copied(*self.call)
        for unit in range(cut.num_units):
            with untouched(self.model):
                self.seed(-1)
                stage = OwnForwardStage(self.model, cut, unit, unit + 1, self.device, has_all=has_all)
                value = stage.run(args, kwargs, self.seed)
            if unit + 1 < cut.num_units:
                tensors, structure = flatten(value, cut.blocks[unit])
                leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
                links.append((tensors, leaves, structure))
                # Pass clones: layers may change their inputs in place.
                args, kwargs = (unflatten([leaf.clone() for leaf in leaves], structure),), {}
        if not torch.is_grad_enabled():
            return Result(value, [], [])
        _loss_of(value).backward()
        gradients, crossing = [self._take_gradients()], list[frozenset[int]]()
        for tensors, leaves, structure in reversed(links):
            arrived = unflatten(leaves, structure)[2]
            with_gradient = [at for at, value in arrived.items() if any(t.grad is not None for t in tensors_of(value))]
            crossing.insert(0, frozenset(map(int, with_gradient)))
            pairs = [(tensor, leaf.grad) for tensor, leaf in zip(tensors, leaves) if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
            gradients.insert(0, self._take_gradients())
        return Result(value, gradients, [frozenset(), *crossing])

    def costs(self, cut: OwnForwardCut) -> list[float]:
        """Return the number of floating-point operations of every unit, plus 1, so that no cost is 0."""
        totals: list[int] = []
        with FlopCounterMode(display=False) as counter:  # it fails under no_grad if arguments are parameters
            self.forward(cut, lambda _: totals.append(counter.get_total_flops()))
        return [1.0 + after - before for before, after in itertools.pairwise(totals)]

    def seed(self, unit: int) -> None:
        """Seed the generators for a unit."""
        seed_generators(0, self.device, unit)

    def _take_gradients(self) -> dict[str, Tensor]:
        """Return name -> gradient of the parameters with a gradient, and reset the gradients."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for parameter in self.model.parameters():
            parameter.grad = None
        return found


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore a model's attributes, buffers, gradients and ``requires_grad`` at the end.

    Forwards change copies of the buffers, since backwards may need the originals. Attention's fast path rounds
    differently, and is disabled as on stages.
    """
    attributes = [(vars(module), dict(vars(module))) for module in {*model.modules(), called_by_steps(model)}]
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
    copied_tables: dict[int, dict[str, Tensor | None]] = {}
    for now, before in attributes:
        table = {key: None if buffer is None else copies[id(buffer)] for key, buffer in before["_buffers"].items()}
        now["_buffers"] = copied_tables.setdefault(id(before["_buffers"]), table)
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for now, before in attributes:
            now.clear()
            now.update(before)
        for parameter, trains, gradient in parameters:
            parameter.requires_grad_(trains)
            parameter.grad = gradient


def compare(expected: Result, found: Result) -> bool:
    """Compare two runs; return whether every parameter has gradients in the same number of units.

    If so, the gradients of each parameter are added in the same order.

    Raises:
        ConfigurationError: outputs differ or are NaN, or gradients differ by more than rounding.
    """
    ours, theirs = list(tensors_of(found.output)), list(tensors_of(expected.output))
    if len(ours) != len(theirs) or not all(map(equal, ours, theirs)):
        raise ConfigurationError("its output differs")
    if any(t.numel() and bool((t != t).all()) for t in theirs):
        raise ConfigurationError("its output is NaN with the example: give an example whose output is a number")
    gradients, others = _summed(expected), _summed(found)
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    for name in {**gradients, **others}:
        a, b = (of_run.get(name, torch.zeros(())) for of_run in (gradients, others))
        if a.numel() and b.numel():
            apart = float((a.double().nan_to_num() - b.double().nan_to_num()).abs().max())
            largest = max(float(a.abs().max()), float(b.abs().max()))
            if apart > _ROUNDING * max(largest, 1e-3 * scale):
                raise ConfigurationError(f"the gradient of {name} differs")
    return _num_uses(expected) == _num_uses(found)


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _num_uses(result: Result) -> Counter[str]:
    return Counter(name for of_unit in result.gradients for name in of_unit)


def _summed(result: Result) -> dict[str, Tensor]:
    """Return the sum of all units' gradients; as in a backward of the whole model, the last use is added first."""
    total: dict[str, Tensor] = {}
    for of_unit in reversed(result.gradients):
        for name, gradient in of_unit.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _loss_of(output: Any) -> Tensor:
    """Return the sum of an output's entries, with a different weight for each."""
    weighed = [
        (t * torch.linspace(0.5, 1.5, t.numel(), device=t.device).view(t.shape)).float().sum()
        for t in tensors_of(output)
        if t.is_floating_point() and t.requires_grad
    ]
    if not weighed:
        raise ConfigurationError("its output does not depend on its parameters: nothing can be trained")
    return torch.stack(weighed).sum()
