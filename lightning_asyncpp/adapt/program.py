"""What is known of a model's forward: which blocks it calls, and what the code around them needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_asyncpp.adapt.packing import Output, tensor_numbers_in
from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.errors import ConfigurationError


def switches_of(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name -> value of a call's arguments that hold no tensors, but for None and False.

    Of Python's numbers and lists of them or of strings, such as one per sample, the type alone counts: their values
    always travel. So do those of tensors that the example lacks: they may come or not.
    """
    found: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if value is not None and value is not False and next(tensors_of(value), None) is None:
            found.append(
                (name, value if isinstance(value, (bool, str)) or not _is_data(value) else type(value).__name__)
            )
    return found


def _is_data(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(entry, str) or _is_data(entry) for entry in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass
class Program:
    """A forward as blocks, and glue: the code before, between and after them.

    Glue number g runs before run g of blocks, and while these follow each other; the last one after all blocks.

    Attributes:
        blocks: names of the modules that a pipeline may cut between, in the order of their calls.
        starts: position of the first block of every run.
        members: by glue, names of the submodules and parameters that it uses.
        calls: by number of a call of such a submodule, its name.
        templates: by block, its output, with marks in the places of its leaves.
        call_templates: the same by number of a call.
        call_gaps: by number of a call, the position of the next block.
        alike: by block, of each leaf of its output: whether its shape is that of the block's first tensor; None of what
            is no tensor.
        live: by glue, the outputs of earlier blocks that it needs.
        live_calls: by glue, numbers of earlier calls whose outputs it needs.
        blank_inputs: by glue, the call's tensors that it takes no values of, as :meth:`tensor_names` calls them.
        around: names of the modules that are neither blocks nor called by glue, nor within these: those of glue itself.
        mixed: (glue, what it computes from what), of values that are not there; it comes to the same (``torch.where``).
        last_use: an output that later ones need -> position of the last block, or the glue's first block, that does.
        constants: objects among the arguments of blocks.
        costs: by unit, floating-point operations of its forward and backward.
        unused: names of parameters that the forward does not use.
        in_place: whether code around the blocks changes in place what they return.
        changes_inputs: whether code around the blocks changes tensors of the call in place.
        changes_outputs: whether it so changes what blocks or submodules returned, or blocks took.
        draws_on_host: whether code around the blocks draws random numbers of Python or NumPy.
        positional: names of the arguments of the forward that may come by position, in order.
        defaults: of arguments that may be left out.
        switches: the call's arguments that are no tensors, as :func:`switches_of` gives them.
        shapes: name -> shape and dtype, of parameters that glue uses by themselves.
    """

    blocks: list[str]
    starts: list[int] = field(default_factory=lambda: [0])
    members: list[list[str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    templates: list[Any] = field(default_factory=list)
    call_templates: list[Any] = field(default_factory=list)
    call_gaps: list[int] = field(default_factory=list)
    alike: list[list[bool | None]] = field(default_factory=list)
    live: list[set[Output]] = field(default_factory=list)
    live_calls: list[set[int]] = field(default_factory=list)
    blank_inputs: list[set[str]] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    mixed: set[tuple[int, str]] = field(default_factory=set)
    last_use: dict[Output, int] = field(default_factory=dict)
    constants: list[Any] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    in_place: bool = False
    changes_inputs: bool = False
    changes_outputs: bool = False
    draws_on_host: bool = False
    positional: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    switches: list[Any] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = field(default_factory=dict)

    @property
    def tail(self) -> int:
        """Number of the last glue."""
        return len(self.starts)

    def run_of(self, glue: int) -> range:
        """Positions of the blocks behind a glue; none behind the last."""
        edges = [*self.starts, len(self.blocks), len(self.blocks)]
        return range(edges[glue], edges[glue + 1])

    def glue_at(self, position: int) -> int:
        """Which glue runs before the block at a position; after all of them the last."""
        return self.tail if position == len(self.blocks) else bisect_right(self.starts, position) - 1

    def most_crossing(self) -> int:
        """How many results of layers cross a cut at most: one, where each layer takes what the one before returned."""
        outputs: set[Output] = set()
        calls: set[int] = set()
        most = 0
        for glue in range(self.tail, 0, -1):
            outputs, calls = outputs | self.live[glue], calls | self.live_calls[glue]
            first = self.run_of(glue - 1)[0]
            before = [block for block, _ in outputs if block <= first]
            most = max(most, len(before) + sum(self.glue_at(self.call_gaps[number]) < glue for number in calls))
        return most

    def modules(self) -> list[str]:
        """Names of the submodules that glue calls."""
        return list(dict.fromkeys(self.calls))

    def parameters(self) -> list[str]:
        """Names of the parameters that glue uses by themselves."""
        modules = set(self.modules())
        return list(dict.fromkeys(name for members in self.members for name in members if name not in modules))

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, also those that come by position or not at all."""
        names = [*self.positional, *(f"argument {i}" for i in range(len(self.positional), len(args)))]
        return {**self.defaults, **dict(zip(names, args)), **kwargs}

    def tensor_names(self, call: Any) -> dict[int, set[str]]:
        """Number of a tensor of a call -> name of the argument, and place in it.

        Args:
            call: packed.
        """
        names: dict[int, set[str]] = {}
        for name, packed in self.named(*call).items():
            for place, number in enumerate(tensor_numbers_in(packed)):
                names.setdefault(number, set()).add(f"{name}.{place}")
        return names

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], model: str) -> None:
        """Refuse a call with other switches than the example's: code that it did not run may need other values.

        Raises:
            ConfigurationError: they differ, with the argument.
        """
        given, expected = switches_of(self.named(args, kwargs)), self.switches
        other = [switch for switch in given if switch not in expected]
        other += [switch for switch in expected if switch not in given]
        if other:
            name, value = other[0]
            raise ConfigurationError(
                f"{model} was called with {name}={value!r} in the example that pipelined(model, example) was given, or"
                " is now, but not both times: give an example that is like the batches"
            )

    def units(self) -> list[tuple[int, int | None]]:
        """In order: (glue, None), and (glue, position) of the blocks behind it."""
        found: list[tuple[int, int | None]] = []
        for glue in range(self.tail + 1):
            found += [(glue, None), *((glue, position) for position in self.run_of(glue))]
        return found
