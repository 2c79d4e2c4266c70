"""Stage that runs the model's own ``forward``, for models without ``pipeline_layers()``.

Cuts are between the calls of certain layers, the blocks. A unit is a block with the code before or after it; a stage
has one or more units. Blocks of earlier stages do not run, and the forward ends where the next stage begins. The code
around blocks runs on every stage that reaches it, on values that the code computes itself, on received values, or on
zeros if the results are not used. Besides the arguments of the call, a stage receives one of two kinds of values:

* Outputs of earlier blocks. Calls of those blocks return the received values. Unit i is block i with the code before
  it; one more unit is the code after the last block. This suits chains of blocks, and forwards with skip connections
  (U-Nets).
* Inputs of the stage's first block. The received values overwrite the inputs in place, so that later uses of the inputs
  get these values. Unit i is block i with the code after it. With ``x = x + block(x)`` only one tensor crosses a cut,
  instead of the outputs of all blocks. Before a block of a decoder, the encoder's output crosses, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.pruned import Place, places_of, without_memory
from lightning_asyncpp.core.tree import leaves_of, map_tensors, tensors_of
from lightning_asyncpp.errors import ConfigurationError

Entered = Callable[[int], None]
"""Function called with the number of a unit when its code begins."""


class Members(nn.Module):
    """Container of parts of a model, under their names in the model.

    Args:
        model: the model.
        names: names of submodules, parameters and buffers; no submodule contains another part.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            parent, _, key = name.rpartition(".")
            node: nn.Module = self
            for step in parent.split(".") if parent else ():
                if step not in dict(node.named_children()):
                    node.add_module(step, nn.Module())
                node = node.get_submodule(step)
            part = attrgetter(name)(model)
            if isinstance(part, (nn.Module, nn.Parameter)):
                setattr(node, key, part)
            else:
                node.register_buffer(key, part)


@dataclass(frozen=True, eq=False)
class OwnForwardCut:
    """Possible cuts of a model whose own ``forward`` runs on every stage; the model's attribute ``pipeline_layers``.

    Attributes:
        blocks: names of the blocks, in the order of their calls.
        around: for each unit, names of the parameters outside of its block that its code uses, and of the buffers
            that it changes there.
        outputs: for each block, the shape of its first floating-point input in the example, and its output with tensors
            on the meta device.
        crossing: for each unit, the values that cross a cut before the unit: numbers of the earlier blocks whose
            outputs cross; with ``by_inputs``, positions among the inputs of the unit's block.
        by_inputs: whether inputs of blocks cross cuts instead of outputs.
        blank: positions and names of arguments whose floating-point values only the first stage needs.
        is_exact: whether gradients are added in the same order as in the whole model, because no value is used on
            several stages.
    """

    blocks: tuple[str, ...]
    around: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[Sequence[int], Any], ...]
    crossing: tuple[frozenset[int], ...]
    by_inputs: bool = False
    blank: frozenset[int | str] = frozenset()
    is_exact: bool = False

    def __call__(self) -> list[Any]:
        """Raise, since there are no layers to be applied in order."""
        raise ConfigurationError("this model has no pipeline_layers(): its own forward runs on every stage")

    @property
    def num_units(self) -> int:
        """Number of units: one more than blocks; with ``by_inputs``, the number of blocks."""
        return len(self.around)

    def names_of(self, unit: int) -> list[str]:
        """Return the names of a unit's parameters, buffers and block."""
        return [*self.around[unit], *self.blocks[unit : unit + 1]]


class OwnForwardStage:
    """Units of one stage, which run in the model's own forward.

    Placeholders, which are zeros with the memory of one element, replace the weights that only other stages have.

    Args:
        model: whole model; or a cut model in which the tensors of other stages are shown (:class:`.Pruned`).
        cut: possible cuts of the model.
        first: first unit of the stage.
        end: one past the last unit of the stage.
        device: device of the placeholders.
        dtype: dtype of floating-point placeholders; default: the dtypes of the weights.
        has_all: whether the forward has the weights of all units, without placeholders.
    """

    def __init__(
        self, model: nn.Module, cut: OwnForwardCut, first: int, end: int,
        device: torch.device | None = None, dtype: torch.dtype | None = None, has_all: bool = False,
    ) -> None:  # fmt: skip
        self.cut, self.first, self.end = cut, first, end
        self._device = device or torch.device("cpu")
        called = called_by_steps(model)
        self._forward = vars(called).get("forward") or functools.partial(type(called).forward, called)
        blocks = [model.get_submodule(name) for name in cut.blocks]
        self._numbers = {block: number for number, block in enumerate(blocks)}
        self._kinds = [(block, type(block), _steered(cast(Any, type(block)))) for block in blocks]
        self._stand_ins = [] if has_all else list(self._standing_for_others(model, dtype))
        self._sends = cut.crossing[end] if end < cut.num_units else frozenset()
        # Of the running forward: callback for units; received values and values to send, by number in cut.crossing.
        self._entered: Entered = lambda unit: None
        self._arrived: dict[int, Any] = {}
        self._made: dict[int, Any] = {}

    def _standing_for_others(self, model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[Place, Tensor]]:
        """Yield the places of tensors that only other stages have, with placeholders.

        Code may write to buffers around blocks, such as running means. So the placeholder of such a buffer has memory
        for all elements, with invalid values.
        """
        held = [Members(model, self.cut.names_of(unit)) for unit in range(self.cut.num_units)]
        tensors = [{id(tensor) for tensor in (*part.parameters(), *part.buffers())} for part in held]
        own = set().union(*tensors[self.first : self.end], map(id, buffers_everywhere(model, self.cut)))
        others = set().union(*tensors) - own
        inside = {module for block in self._numbers for module in block.modules()}
        for module in model.modules():
            for place in (place for place in places_of(module) if id(place.tensor) in others):
                is_real = place.tensor.is_floating_point()
                stand_in = without_memory(place.tensor, self._device, dtype if is_real else None)
                if module not in inside and not isinstance(place.tensor, nn.Parameter):
                    stand_in = stand_in.contiguous().fill_(math.nan if is_real else 77)
                yield place, stand_in

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], entered: Entered = lambda unit: None) -> Any:
        """Run the units.

        Args:
            args: arguments of the model; after the first stage, only the output of the previous stage.
            kwargs: keyword arguments of the model; empty after the first stage.
            entered: function called when each unit begins.

        Returns:
            Output of the model on the last stage, else the argument of the next stage.
        """
        arrived: Mapping[str, Any] = {}
        if self.first:
            args, kwargs, arrived = args[0]
        is_last = self.end == self.cut.num_units
        sent = () if is_last else _mapped(self._sent, args, kwargs)
        given = _mapped(self._given, args, kwargs) if self.first else (args, kwargs)
        self._entered, self._arrived = entered, {int(at): value for at, value in arrived.items()}
        self._made = {} if self.cut.by_inputs else dict(self._arrived)
        output = None
        try:
            with suppress(_Reached), self._steering():
                self._entered(0)  # code around earlier blocks also runs here, and draws random numbers
                output = self._forward(*given[0], **given[1])
            if self.cut.by_inputs and self._arrived:
                raise self._not_called(self.first)
            return output if is_last else [*sent, self._leaving()]
        finally:
            self._arrived, self._made = {}, {}

    def _leaving(self) -> dict[str, Any]:
        """Return the values that the next stage receives besides the arguments."""
        if missing := sorted(self._sends - self._made.keys()):
            raise self._not_called(self.end if self.cut.by_inputs else missing[0])
        return {str(at): self._made[at] for at in sorted(self._sends)}

    def _not_called(self, number: int) -> ConfigurationError:
        return ConfigurationError(
            f"{self.cut.blocks[number]} was not called in this forward, but it was called with the example: call every"
            " block in every forward, or give the model pipeline_layers()"
        )

    def _sent(self, key: int | str, value: Any) -> Any:
        """Return a copy of an argument for the next stage, since the forward may change the argument in place.

        A floating-point tensor that later stages do not need becomes an empty tensor of shape ``(0, *shape)``.
        """
        is_blank = key in self.cut.blank and not self.first
        return map_tensors(
            lambda t: t.new_empty((0, *t.shape)) if is_blank and t.is_floating_point() else t.clone(), value
        )

    def _given(self, key: int | str, value: Any) -> Any:
        """Return an argument for the forward of a later stage, with zeros for the values that were not sent."""
        if key not in self.cut.blank:
            return value
        return map_tensors(lambda t: t.new_zeros(()).expand(t.shape[1:]) if t.is_floating_point() else t, value)

    # -- blocks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _steering(self) -> Iterator[None]:
        """Put placeholders in place, and redirect calls of the blocks to :meth:`call` by changing their classes."""
        fast = torch.backends.mha.get_fastpath_enabled()
        originals = [place.table[place.key] for place, _ in self._stand_ins]
        _UNDER_WAY.append(self)
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # the fast path would read weights of other stages' blocks
            for block, _, steered in self._kinds:
                object.__setattr__(block, "__class__", steered)
            for place, stand_in in self._stand_ins:
                place.table[place.key] = stand_in
            yield
        finally:
            _UNDER_WAY.pop()
            torch.backends.mha.set_fastpath_enabled(fast)
            for block, kind, _ in self._kinds:
                object.__setattr__(block, "__class__", kind)
            for (place, _), original in zip(self._stand_ins, originals):
                place.table[place.key] = original

    def call(self, kind: type, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run or replace a call of a block, and return its output."""
        number, by_inputs = self._numbers[block], self.cut.by_inputs
        if number >= self.end:
            if by_inputs and number == self.end:
                taken = list(leaves_of((args, kwargs)))
                self._made = {at: taken[at] for at in self._sends}
            raise _Reached
        if by_inputs and number:
            self._entered(number)
        if by_inputs and number == self.first:
            self._fill(list(leaves_of((args, kwargs))))
        if number >= self.first:
            output = kind.__call__(block, *args, **kwargs)
        elif number in self._arrived and not by_inputs:
            output = self._arrived[number]
        else:
            output = self._zeros(number, args, kwargs)
        return output if by_inputs else self._behind(number, output)

    def _fill(self, taken: Sequence[Any]) -> None:
        """Copy received values into the inputs of this stage's first block."""
        for at, value in self._arrived.items():
            if not isinstance(taken[at], Tensor) or (taken[at].shape, taken[at].dtype) != (value.shape, value.dtype):
                raise ConfigurationError(
                    f"{self.cut.blocks[self.first]} gets tensors of other shapes or dtypes if the blocks before it do"
                    " not run: give the model pipeline_layers()"
                )
            taken[at].detach_().copy_(value)
        self._arrived = {}

    def _behind(self, number: int, output: Any) -> Any:
        """Keep an output that crosses a cut, and end the forward after the last block of this stage.

        The code after the block may change the output in place, so it gets a copy.
        """
        if number in self._sends:
            self._made[number] = output
        if number + 1 == self.end:
            raise _Reached
        self._entered(number + 1)
        return map_tensors(Tensor.clone, output) if number in self._sends else output

    def _zeros(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return zeros in place of an earlier block's output, with the example's shape scaled to this batch."""
        taken = next((t for t in tensors_of((args, kwargs)) if t.is_floating_point()), None)
        example, output = self.cut.outputs[number]

        def zeros(of: Tensor) -> Tensor:
            if taken is None:
                return torch.zeros(of.shape, dtype=of.dtype, device=self._device)
            dtype = taken.dtype if of.is_floating_point() else of.dtype
            if of.shape == example or of.ndim != taken.ndim:
                return torch.zeros_like(taken, dtype=dtype)
            shape = [max(size * now // max(then, 1), 1) for size, now, then in zip(of.shape, taken.shape, example)]
            return torch.zeros(shape, dtype=dtype, device=self._device)

        return map_tensors(zeros, output)


class _Reached(BaseException):
    """End of a forward, where the next stage begins."""


_UNDER_WAY: list[OwnForwardStage] = []  # the running stage is last


@functools.cache
def _steered(kind: Any) -> Any:
    """Return a subclass of a block's class whose calls go through the running stage."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not _UNDER_WAY:  # a checkpoint runs the block again in the backward
            return kind.__call__(self, *args, **kwargs)
        return _UNDER_WAY[-1].call(kind, self, args, kwargs)

    steered = type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})
    if "forward" in vars(steered):
        # transformers adds a checkpointing forward to each new class, but the base class has one already.
        delattr(steered, "forward")
    return steered


def _mapped(
    function: Callable[[int | str, Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments after replacing each by ``function(position or name, argument)``."""
    named = {name: function(name, value) for name, value in kwargs.items()}
    return [function(at, value) for at, value in enumerate(args)], named


def buffers_everywhere(model: nn.Module, cut: OwnForwardCut) -> list[Tensor]:
    """Return the buffers around blocks that no unit changes; every stage has these buffers."""
    owned = {name for names in cut.around for name in names}
    in_blocks = tuple(f"{name}." for name in cut.blocks)
    named = model.named_buffers(remove_duplicate=False)
    return [buffer for name, buffer in named if name not in owned and not name.startswith(in_blocks)]


def cut_of(model: nn.Module) -> OwnForwardCut | None:
    """Return the cut of a model whose own forward runs; None for other models."""
    cut = getattr(model, "pipeline_layers", None)
    return cut if isinstance(cut, OwnForwardCut) else None
