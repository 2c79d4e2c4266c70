"""A stage that runs the model's own ``forward``, where a model was cut as it is.

Blocks of earlier stages do not run, and the forward ends where the next stage begins. Code around and between blocks
runs on every stage that reaches it, on what it computes itself, on what arrived, or on zeros that nobody looks at. What
arrives beside the arguments of the call is one of two things:

* Outputs of earlier blocks, which return them. Unit i is the block of that number with the code before it, and one unit
  more is the code behind the last. All chains of blocks are cut so, and forwards with skips (U-Nets).
* What the stage's first block takes: its inputs are filled in place, so that code which uses them once more finds the
  same. Unit i is the block with the code behind it. Of ``x = x + block(x)`` one tensor crosses a cut so, not what all
  blocks returned; of an encoder and a decoder what the decoder's blocks take.
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
"""Called with the number of a unit when its code begins."""


class Members(nn.Module):
    """Holds parts of a model, under the names that they have there.

    Args:
        model: whose parts they are.
        names: of submodules, parameters and buffers; none of them is in another one.
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
    """Possible cuts of a model whose own ``forward`` runs on every stage: its ``pipeline_layers``.

    Attributes:
        blocks: names, in the order of their calls.
        around: of every unit, names of parameters and buffers that its code uses beside its block.
        outputs: of every block, the shape of the first tensor of real numbers that it took with the example; and what
            it returned, with tensors on the meta device.
        crossing: of every unit, what crosses a cut in front of it: numbers of earlier blocks, whose outputs do; with
            ``by_inputs`` positions among all that its block takes.
        by_inputs: whether what blocks take crosses.
        blank: positions and names of arguments whose real numbers no stage but the first one needs.
        is_exact: whether gradients are added in the order of the whole model: no value is used on several stages.
    """

    blocks: tuple[str, ...]
    around: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[Sequence[int], Any], ...]
    crossing: tuple[frozenset[int], ...]
    by_inputs: bool = False
    blank: frozenset[int | str] = frozenset()
    is_exact: bool = False

    def __call__(self) -> list[Any]:
        """Nothing that could be applied one after the other."""
        raise ConfigurationError("this model was cut as it is: its own forward runs on every stage")

    @property
    def num_units(self) -> int:
        """One more than blocks, or as many."""
        return len(self.around)

    def names_of(self, unit: int) -> list[str]:
        """Names of what a unit holds."""
        return [*self.around[unit], *self.blocks[unit : unit + 1]]


class OwnForwardStage:
    """Runs some units of a model in its own forward.

    Args:
        model: the whole model, or one whose pruned parts are shown.
        cut: how it may be cut.
        first, end: its units are ``range(first, end)``. Meanwhile tensors without memory stand where other units'
            weights are.
        device: where they stand.
        dtype: of those of real numbers; None: their own.
        has_all: whether other units' weights are here, too.
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
        # Of a forward: who is told of units; what arrived and what is to leave, by the numbers in the cut's crossing.
        self._entered: Entered = lambda unit: None
        self._arrived: dict[int, Any] = {}
        self._made: dict[int, Any] = {}

    def _standing_for_others(self, model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[Place, Tensor]]:
        """Places of what other units hold alone, and tensors for them.

        Buffers around blocks may be written to, such as running means; who reads one there gets no number.
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
            args, kwargs: of the model; behind the first stage the only one is what the stage before returned.
            entered: told of each unit.

        Returns:
            What the model returns; before the last stage what the next one takes.
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
                self._entered(0)  # code around blocks of earlier units runs, and draws, here, too
                output = self._forward(*given[0], **given[1])
            if self.cut.by_inputs and self._arrived:
                raise self._not_called(self.first)
            return output if is_last else [*sent, self._leaving()]
        finally:
            self._arrived, self._made = {}, {}

    def _leaving(self) -> dict[str, Any]:
        """Return the values for the next stage beside the arguments."""
        if missing := sorted(self._sends - self._made.keys()):
            raise self._not_called(self.end if self.cut.by_inputs else missing[0])
        return {str(at): self._made[at] for at in sorted(self._sends)}

    def _not_called(self, number: int) -> ConfigurationError:
        return ConfigurationError(
            f"{self.cut.blocks[number]} was not called in this forward, as it was with the example: call every block in"
            " every forward, or give the model pipeline_layers()"
        )

    def _sent(self, key: int | str, value: Any) -> Any:
        """Return a copy of an argument for the next stage, as the forward may change the argument in place.

        For real numbers that no later stage needs it is an empty tensor, which tells their shape.
        """
        is_blank = key in self.cut.blank and not self.first
        return map_tensors(
            lambda t: t.new_empty((0, *t.shape)) if is_blank and t.is_floating_point() else t.clone(), value
        )

    def _given(self, key: int | str, value: Any) -> Any:
        """Return an argument as the forward of a later stage gets it."""
        if key not in self.cut.blank:
            return value
        return map_tensors(lambda t: t.new_zeros(()).expand(t.shape[1:]) if t.is_floating_point() else t, value)

    # -- blocks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _steering(self) -> Iterator[None]:
        """Have the blocks ask this stage what to do; they stay the objects that they are."""
        fast = torch.backends.mha.get_fastpath_enabled()
        originals = [place.table[place.key] for place, _ in self._stand_ins]
        _UNDER_WAY.append(self)
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it takes the weights of blocks that other stages may have
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
        """Return the output of a call of a block."""
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
        """Fill what this stage's first block takes with what arrived."""
        for at, value in self._arrived.items():
            if not isinstance(taken[at], Tensor) or (taken[at].shape, taken[at].dtype) != (value.shape, value.dtype):
                raise ConfigurationError(
                    f"{self.cut.blocks[self.first]} takes tensors of other shapes or dtypes where blocks before it have"
                    " not run than where they have: give the model pipeline_layers()"
                )
            taken[at].detach_().copy_(value)
        self._arrived = {}

    def _behind(self, number: int, output: Any) -> Any:
        """Keep an output that crosses a cut, and end the forward after the last block of this stage.

        Code behind a block gets a copy of what goes on, since it may change that in place.
        """
        if number in self._sends:
            self._made[number] = output
        if number + 1 == self.end:
            raise _Reached
        self._entered(number + 1)
        return map_tensors(Tensor.clone, output) if number in self._sends else output

    def _zeros(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return zeros for an unused output of an earlier stage's block, of the example's shape scaled to the batch."""
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
    """Ends a forward where the next stage begins."""


_UNDER_WAY: list[OwnForwardStage] = []  # the one that runs


@functools.cache
def _steered(kind: Any) -> Any:
    """A class of blocks whose calls go through the stage that runs."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _UNDER_WAY[-1].call(kind, self, args, kwargs)

    steered = type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})
    if "forward" in vars(steered):
        delattr(steered, "forward")  # transformers gives every class of layers one that checkpoints: once is enough
    return steered


def _mapped(
    function: Callable[[int | str, Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with a function of each one's position or name, and of itself, in their places."""
    named = {name: function(name, value) for name, value in kwargs.items()}
    return [function(at, value) for at, value in enumerate(args)], named


def buffers_everywhere(model: nn.Module, cut: OwnForwardCut) -> list[Tensor]:
    """Buffers around the blocks that no unit changes: every stage has them, also where blocks hold them, too."""
    owned = {name for names in cut.around for name in names}
    in_blocks = tuple(f"{name}." for name in cut.blocks)
    named = model.named_buffers(remove_duplicate=False)
    return [buffer for name, buffer in named if name not in owned and not name.startswith(in_blocks)]


def cut_of(model: nn.Module) -> OwnForwardCut | None:
    """Return the cut of a model whose own forward runs; None if its layers are applied one after the other."""
    cut = getattr(model, "pipeline_layers", None)
    return cut if isinstance(cut, OwnForwardCut) else None
