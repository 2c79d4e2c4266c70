"""A stage that runs the model's own ``forward``, where a model was cut as it is.

A block of an earlier stage returns what arrived for it; a block of this stage runs; behind the last one of them the
forward ends. Code around and between blocks runs on every stage that reaches it, on what it computes itself, or on
values that nobody looks at.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.batches.tree import map_leaves, map_tensors, tensors_of
from lightning_asyncpp.core.cut.module_as_network import called_by_steps
from lightning_asyncpp.core.cut.pruned import Place, places_of
from lightning_asyncpp.errors import ConfigurationError

_BLANK = "tensor without values"  # key of what stands for one in a message
Entered = Callable[[int], None]
"""Called with the number of a unit when its code begins."""


class TensorFacts(NamedTuple):
    """What is known of a tensor that is not there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor that takes one element."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


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


@dataclass(frozen=True)
class OwnForwardCut:
    """Where a model may be cut whose own ``forward`` runs on every stage: its ``pipeline_layers``.

    Unit number i is the block of that number with the code before it, and one unit more is the code behind the last;
    with ``by_inputs`` that belongs to the last block's.

    Attributes:
        blocks: names, in the order of their calls.
        around: of every unit, names of submodules, parameters and buffers that its code uses beside its block.
        outputs: what the blocks returned with the example, with :class:`TensorFacts` in the places of tensors.
        needs: of every unit, numbers of earlier blocks whose outputs its code uses.
        blank: positions and names of arguments whose real numbers no stage but the first one needs.
        draws_between: whether code around blocks draws random numbers.
        by_inputs: whether what crosses is what the next block takes, in place of what the one before returned: of a
            forward that adds what its blocks return to what they took. Blocks of earlier stages then return zeros.
        is_exact: whether gradients are added in the order of the whole model: no value is used on several stages.
        copies: whether code behind a block gets a copy of what goes to another stage, too, as it changes it in place.
    """

    blocks: tuple[str, ...]
    around: tuple[tuple[str, ...], ...]
    outputs: tuple[Any, ...]
    needs: tuple[frozenset[int], ...]
    blank: frozenset[int | str] = frozenset()
    draws_between: bool = True
    by_inputs: bool = False
    is_exact: bool = True
    copies: bool = False

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

    def crossing(self, unit: int) -> list[int]:
        """Numbers of the blocks whose outputs cross a cut before a unit."""
        return sorted(i for i in set().union(*self.needs[unit:]) if i < unit)


class OwnForwardStage:
    """Runs some units of a model in its own forward.

    Args:
        model: the whole model, or one whose pruned parts are shown.
        cut: how it may be cut.
        first, end: its units are ``range(first, end)``. Tensors without memory stand where other units' weights are
            while code around blocks runs.
        device: where they stand.
        dtype: of those of real numbers; None: their own.
    """

    def __init__(
        self, model: nn.Module, cut: OwnForwardCut, first: int, end: int,
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.first, self.end = cut, first, end
        self._device = device or torch.device("cpu")
        called = called_by_steps(model)
        self._forward = vars(called).get("forward") or functools.partial(type(called).forward, called)
        blocks = [model.get_submodule(name) for name in cut.blocks]
        self._numbers = {block: number for number, block in enumerate(blocks)}
        self._kinds = {block: (type(block), _steered(cast(Any, type(block)))) for block in blocks}
        self._stand_ins = [(place, self._standing_for(place.tensor, dtype)) for place in self._others(model)]
        self.sends = set(cut.crossing(end)) if end < cut.num_units else set()

    def _others(self, model: nn.Module) -> Iterator[Place]:
        """Places around blocks of what other units hold alone."""
        units = range(self.cut.num_units)
        own = {id(tensor) for unit in units[self.first : self.end] for tensor in self._held(model, unit)}
        others = {id(tensor) for unit in units for tensor in self._held(model, unit, blocks=False)}
        if not self.cut.by_inputs:  # where zeros have to come from the code before
            others -= own
        inside = {module for block in self._numbers for module in block.modules()}
        for module in dict.fromkeys(model.modules()):
            if module not in inside:
                yield from (place for place in places_of(module) if id(place.tensor) in others)

    def _held(self, model: nn.Module, unit: int, blocks: bool = True) -> Iterator[Tensor]:
        held = Members(model, self.cut.names_of(unit) if blocks else self.cut.around[unit])
        return itertools.chain(held.parameters(), held.buffers())

    def _standing_for(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """A tensor without memory for a parameter; buffers, such as running means, may be written to."""
        facts = TensorFacts(tuple(tensor.shape), (tensor.is_floating_point() and dtype) or tensor.dtype)
        stand_in = facts.stand_in(self._device)
        return stand_in if isinstance(tensor, nn.Parameter) else stand_in.clone(memory_format=torch.contiguous_format)

    def run(self, args: tuple, kwargs: Mapping[str, Any], entered: Entered = lambda unit: None) -> Any:
        """Run the units.

        Args:
            args, kwargs: of the model; behind the first stage the only one is what the stage before returned.
            entered: told of each unit.

        Returns:
            What the model returns; before the last stage what the next one takes.
        """
        arrived: Mapping[int, Any] = {}
        if self.first:
            args, kwargs, arrived = self._unpack(args[0])
        run = _Run(self, arrived, entered)
        call = (args, dict(kwargs)) if self.end < self.cut.num_units else None
        if not self.first or self.cut.draws_between:
            entered(0)
        try:
            with self._steering(run):
                output = self._forward(*map_leaves(lambda leaf: leaf, tuple(args)), **kwargs)
        except _Reached:
            output = None
        if call is None:
            return output
        return self._pack(call, {**arrived, **run.made})

    # -- what crosses a cut ---------------------------------------------------------------------------------------

    def _pack(self, call: tuple[tuple, dict[str, Any]], outputs: Mapping[int, Any]) -> Any:
        if missing := sorted(self.sends - outputs.keys()):
            raise ConfigurationError(
                f"{self.cut.blocks[missing[0]]} was not called in this forward, as it was with the example: what it"
                " returns is needed on the next stage; call every block in every forward, or give the model"
                " pipeline_layers()"
            )
        args, kwargs = call
        blank = self.cut.blank
        packed = [_without_values(value) if at in blank else value for at, value in enumerate(args)]
        named = {name: _without_values(value) if name in blank else value for name, value in kwargs.items()}
        return [packed, named, {str(number): outputs[number] for number in sorted(self.sends)}]

    def _unpack(self, arrived: Any) -> tuple[tuple, dict[str, Any], dict[int, Any]]:
        args, kwargs, outputs = arrived
        args, kwargs = (map_leaves(self._stood_for, value, _is_blank) for value in (args, kwargs))
        return tuple(args), kwargs, {int(number): output for number, output in outputs.items()}

    def _stood_for(self, leaf: Any) -> Any:
        if not _is_blank(leaf):
            return leaf
        shape, dtype = leaf[_BLANK]
        return TensorFacts(tuple(shape), getattr(torch, dtype)).stand_in(self._device)

    def stand_in(self, number: int, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """What a block of an earlier stage returns where nobody looks: the first tensor that it took, or zeros."""
        taken = _first_of(args, kwargs)
        if taken is not None and self.cut.by_inputs:
            taken = torch.zeros_like(taken)
        elif taken is not None and number == 0:
            taken = taken.clone()  # it may be the batch's own, and code behind may change it in place

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, TensorFacts):
                return leaf
            return leaf.stand_in(self._device) if taken is None else taken

        return map_leaves(filled, self.cut.outputs[number], lambda node: isinstance(node, TensorFacts))

    def copy_of(self, output: Any) -> Any:
        """What code behind a block gets of an output that goes to another stage, too."""
        return map_tensors(Tensor.clone, output) if self.cut.copies else output

    # -- blocks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _steering(self, run: _Run) -> Iterator[None]:
        """Have the blocks ask a run what to do; they stay the objects that they are."""
        fast = torch.backends.mha.get_fastpath_enabled()
        run.originals = [(place, place.table[place.key]) for place, _ in self._stand_ins]
        _RUNS.append(run)
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it takes the weights of blocks that may be elsewhere
            for block, (_, steered) in self._kinds.items():
                object.__setattr__(block, "__class__", steered)
            for place, stand_in in self._stand_ins if self.first or not self.cut.by_inputs else ():
                place.table[place.key] = stand_in
            yield
        finally:
            _RUNS.pop()
            torch.backends.mha.set_fastpath_enabled(fast)
            for block, (kind, _) in self._kinds.items():
                object.__setattr__(block, "__class__", kind)
            run.put_back()

    def number_of(self, block: nn.Module) -> int:
        """The number of a block."""
        return self._numbers[block]


class _Run:
    """One forward of a stage.

    Attributes:
        made: number of a block of this stage -> what it returned, if another stage needs it.
    """

    def __init__(self, stage: OwnForwardStage, arrived: Mapping[int, Any], entered: Entered) -> None:
        self.stage, self.arrived, self.entered = stage, arrived, entered
        self.made: dict[int, Any] = {}
        self.originals: list[tuple[Place, Any]] = []

    def put_back(self) -> None:
        """Have what the stage holds where stand-ins are."""
        for place, original in self.originals:
            place.table[place.key] = original

    def call(self, kind: type, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a call of a block gives."""
        stage, number = self.stage, self.stage.number_of(block)
        if number >= stage.end:
            if stage.cut.by_inputs:
                self.made[stage.end - 1] = _first_of(args, kwargs)
            raise _Reached
        if number >= stage.first:
            output = kind.__call__(block, *args, **kwargs)
            if number in stage.sends:
                self.made[number] = output
                output = output if number + 1 == stage.end else stage.copy_of(output)
        elif number in self.arrived:
            output = self.arrived[number]
            output = stage.copy_of(output) if number in stage.sends else output
        else:
            output = stage.stand_in(number, args, kwargs)
        following = number + 1
        if following == stage.first and stage.cut.by_inputs:
            self.put_back()
        if following == stage.end and not stage.cut.by_inputs:
            raise _Reached
        if following < stage.end and (following >= stage.first or stage.cut.draws_between):
            self.entered(following)
        return output


class _Reached(BaseException):
    """Ends a forward behind the last block of a stage."""


_RUNS: list[_Run] = []  # the one that is under way


@functools.cache
def _steered(kind: Any) -> Any:
    """A class of blocks whose calls go through the run that is under way."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _RUNS[-1].call(kind, self, args, kwargs)

    steered = type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})
    if "forward" in vars(steered):
        delattr(steered, "forward")  # transformers gives every class of layers one that checkpoints: once is enough
    return steered


def _first_of(args: tuple, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor of real numbers among arguments."""
    return next((t for t in tensors_of((args, dict(kwargs))) if t.is_floating_point()), None)


def _without_values(value: Any) -> Any:
    def blank(tensor: Tensor) -> Any:
        if not tensor.is_floating_point():
            return tensor
        return {_BLANK: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}

    return map_tensors(blank, value)


def _is_blank(node: Any) -> bool:
    return isinstance(node, dict) and _BLANK in node


def cut_of(model: nn.Module) -> OwnForwardCut | None:
    """How a model is cut as it is; None if its layers are applied one after the other."""
    cut = getattr(model, "pipeline_layers", None)
    return cut if isinstance(cut, OwnForwardCut) else None
