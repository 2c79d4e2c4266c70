"""Runs a model's own forward for the code around its blocks, with shells in the places of what is not to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.contexts import Context, context_now, is_checkpointed, runs_again, without_fast_path
from lightning_asyncpp.adapt.draws import host_as_before, seed_host
from lightning_asyncpp.adapt.left_behind import replace_left_behind
from lightning_asyncpp.adapt.packing import (
    Output,
    TensorTable,
    check_structure,
    filled,
    taken,
    tensor_numbers_in,
    version_of,
)
from lightning_asyncpp.adapt.program import Program
from lightning_asyncpp.adapt.shells import Shell, in_place_of
from lightning_asyncpp.core.batches.tree import leaves_of, tensors_of
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.core.randomness import derive
from lightning_asyncpp.errors import ConfigurationError

Leaves = list[Any]


class _BlocksKnown(BaseException):
    """All blocks behind a glue have their arguments; no ``except Exception`` of the model's is to catch it."""


@dataclass
class Earlier:
    """What came before a glue.

    Attributes:
        outputs: of blocks; of those that are not there, nobody needs a value.
        calls: by number, the leaves of what submodules returned in earlier glue.
        seeds: by glue, those that their code drew random numbers from, if it did; also of the glue that is to run, if
            it is not to draw its own.
    """

    outputs: Mapping[Output, Any] = field(default_factory=dict)
    calls: Sequence[Leaves] = ()
    seeds: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a glue came to.

    Attributes:
        arguments: of the blocks behind it, as they travel.
        contexts: in which it calls them, where they are others than that of the model's call.
        unknown: which of its arguments, or the output, are computed from what was not there, in words.
        asked: positions of those whose outputs it asked for shape or dtype, which it was told as those of the example.
        calls: the leaves of what its own submodules returned.
        changes_inputs: whether its own code changed tensors of the call in place.
        changed_since: position of the first block behind it of which it changed in place what that is to take.
        changes_outputs: whether it so changed what blocks or submodules returned, or earlier blocks took.
        seed: of the random numbers that its own code drew, if it drew some.
        output: of the model, behind the last glue.
    """

    arguments: list[Any] = field(default_factory=list)
    contexts: list[Context | None] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    calls: list[Leaves] = field(default_factory=list)
    changes_inputs: bool = False
    changed_since: int | None = None
    changes_outputs: bool = False
    seed: int | None = None
    output: Any = None


class Replay:
    """One forward for one glue.

    Args:
        model: the model, or what a stage has of it.
        program: what is known of its forward.
        shells: name -> shell, of all blocks and submodules of the program.
        glue: which is to run.
        earlier: what came before.
        table: knows the tensors of the call; it takes up those of the blocks' arguments.
    """

    def __init__(
        self, model: nn.Module, program: Program, shells: Mapping[str, Shell], glue: int, earlier: Earlier,
        table: TensorTable,
    ) -> None:  # fmt: skip
        self._model, self._program, self._shells = model, program, shells
        self._glue, self._earlier, self._table = glue, earlier, table
        self._run = program.run_of(glue)
        self._unknown = next(iter(shells.values())).unknown
        self._position = 0  # of the next block
        self._calls = 0
        self._noted: list[tuple[Tensor, int]] = []  # of what came, in which version
        self._draws: Counter[int] = Counter()  # by glue
        self.outcome = Outcome()
        self._kept: dict[int, list[int]] = {}  # of what blocks took, by position
        for position, number in earlier.outputs:
            if number < 0 and (glue >= len(program.live) or (position, number) in program.live[glue]):
                self._kept.setdefault(position, []).append(number)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        """Run it.

        Raises:
            ConfigurationError: the forward takes another way than it did with the example.
        """
        program, self._unknown.training = self._program, self._model.training
        self._context = context_now()
        self._unknown.seed_of_draw = self._seed_of_draw
        if program.draws_on_host:
            self._own_seed()
        self._inputs = list(tensors_of([args, kwargs]))
        self._note_inputs()
        modules = {name: self._shells[name] for name in (*program.blocks, *program.modules())}
        for position, name in enumerate(program.blocks):
            modules[name].answer = self._block(position)
        for name in program.modules():
            modules[name].answer = self._submodule(name, self._model.get_submodule(name))
        for name, shell in modules.items():
            shell.hide(self._model.get_submodule(name))
        try:
            with (
                in_place_of(self._model, modules, self._parameters()),
                self._host_preserved(),
                without_fast_path(),
                self._unknown,
            ):
                self._seed_host()
                output = type(self._model).forward(self._model, *args, **kwargs)
            output = self.outcome.output = self._unknown.replaced(output)
            self._look_at(output, "the model's output")
            replace_left_behind(self._model, program.around, self._unknown)
        except _BlocksKnown:
            return self.outcome
        finally:
            self._compare_inputs()
            self.outcome.changed_since = self._changed_since()
            blocks = {f"what {program.blocks[position]} returned": position for position in self._run}
            self.outcome.asked = {blocks[what] for what in self._unknown.asked if what in blocks}
            self._unknown.forget()
            for shell in modules.values():
                shell.answer = None
                shell.hide(None)
        if self._run or self._position != len(program.blocks):
            raise self._other_way("the end")
        return self.outcome

    def _parameters(self) -> dict[str, Tensor]:
        own = set(self._program.members[self._glue])
        others = [name for name in self._program.parameters() if name not in own]
        return {name: self._unknown.nothing(name, *self._program.shapes[name]) for name in others}

    def _block(self, position: int) -> Callable[[tuple, dict[str, Any]], Any]:
        def answer(args: tuple, kwargs: dict[str, Any]) -> Any:
            if position != self._position:
                raise self._other_way(self._program.blocks[position])
            if self._context[0] and not torch.is_grad_enabled() and is_checkpointed():
                raise ConfigurationError(
                    f"forward of {class_name(self._model)} calls {self._program.blocks[position]} in a"
                    " torch.utils.checkpoint with use_reentrant=True, through which no gradient of another pipeline"
                    " stage comes: use use_reentrant=False, or switch it off"
                )
            self._position += 1
            self._seed_host()
            if position in self._run:
                return self._coming(position, *self._unknown.replaced((args, kwargs)))
            if position in self._kept:
                self._restore_taken(position, args, kwargs)
            leaves = [
                self._given(self._earlier.outputs[position, leaf])
                if (position, leaf) in self._earlier.outputs
                else self._nothing(position, args, kwargs, alike)
                for leaf, alike in enumerate(self._program.alike[position])
            ]
            return self._known(position, leaves)

        return partial(self._unknown.set_aside, answer)

    def _restore_taken(self, position: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Code behind a block goes on with what the block took, where that is needed and was kept."""
        tensors = taken(args, kwargs)
        for number in self._kept[position]:
            if number not in tensors:
                raise self._other_way(self._program.blocks[position])
            self._unknown.replace(tensors[number], self._given(self._earlier.outputs[position, number]))

    def _changed_since(self) -> int | None:
        inputs = len(self._inputs)
        for position, packed in zip(self._run, self.outcome.arguments):
            made = [number for number in tensor_numbers_in(packed) if number >= inputs]
            if any(self._table.is_changed(number) for number in made):
                return position
        return None

    def _coming(self, position: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A block that is still to run: keep what it is to be called with."""
        arguments = [list(args), kwargs]
        name = self._program.blocks[position]
        before = len(self._table.tensors)
        self.outcome.arguments.append(self._table.pack(arguments, name))
        self._look_at(self._table.tensors[before:], f"what {name} takes")
        context = context_now()
        self.outcome.contexts.append(None if context == self._context else context)
        if position == self._run[-1]:
            raise _BlocksKnown
        alike = self._program.alike[position]
        return self._known(position, [self._nothing(position, args, kwargs, leaf) for leaf in alike])

    def _known(self, position: int, leaves: list[Any]) -> Any:
        output = filled(self._program.templates[position], leaves)
        self._table.know(position, output)
        return output

    def _submodule(self, name: str, real: nn.Module) -> Callable[[tuple, dict[str, Any]], Any]:
        def answer(args: tuple, kwargs: dict[str, Any]) -> Any:
            number, program = self._calls, self._program
            args, kwargs = self._unknown.replaced((args, kwargs))
            self._calls += 1
            expected = (program.calls[number], program.call_gaps[number]) if number < len(program.calls) else None
            if (name, self._position) != expected:
                raise self._other_way(name)
            if self._program.glue_at(self._position) != self._glue:
                given = [self._given(leaf) for leaf in self._earlier.calls[number]]
                return filled(self._program.call_templates[number], given)
            self._unknown.refuse_drawn([args, kwargs], f"what {name} takes")
            self._compare_inputs()
            self._unknown.seed_of_draw = None
            looked_at = self._unknown if self._unknown.source_of([args, kwargs]) else nullcontext()
            with looked_at, self._host_preserved():
                output = real(*args, **kwargs)
            self._unknown.seed_of_draw = self._seed_of_draw
            self._note_inputs()  # what a submodule changes it changes once
            check_structure(self._program.call_templates[number], output, name)
            self.outcome.calls.append([self._given(leaf) for leaf in leaves_of(output)])
            self._noted += [(tensor, version_of(tensor)) for tensor in tensors_of(output)]
            return output

        return partial(self._unknown.set_aside, answer)

    def _seed_of_draw(self) -> int | None:
        """So that code that runs again, on another stage, draws what it drew the first time."""
        if runs_again():  # in the backward, where nobody tells it what to draw
            raise ConfigurationError(
                f"forward of {class_name(self._model)} draws random numbers in a torch.utils.checkpoint around its"
                " layers, and would draw others when that runs again for gradients: leave this checkpoint out, put it"
                " into a layer, or give the model pipeline_layers()"
            )
        glue = self._program.glue_at(self._position)
        self._draws[glue] += 1
        seed = self._seed_of(glue)
        return None if seed is None else derive(seed, "draw", self._draws[glue])

    def _seed_of(self, glue: int) -> int | None:
        return self._own_seed() if glue == self._glue else self._earlier.seeds.get(glue)

    def _own_seed(self) -> int:
        if self.outcome.seed is None:
            given = self._earlier.seeds.get(self._glue)
            self.outcome.seed = _new_seed() if given is None else given
        return self.outcome.seed

    def _seed_host(self) -> None:
        """The same for Python's and NumPy's numbers, from the code in front of a block to the next one."""
        seed = self._seed_of(self._program.glue_at(self._position)) if self._program.draws_on_host else None
        if seed is not None:
            seed_host(seed, self._position)

    def _host_preserved(self) -> AbstractContextManager[None]:
        return host_as_before() if self._program.draws_on_host else nullcontext()

    def _given(self, value: Any) -> Any:
        """A value that comes from elsewhere, of which other code is to find what came."""
        if not isinstance(value, Tensor) or self._unknown.source_of(value):
            return value
        if self._program.changes_outputs:
            return value.clone()
        self._noted.append((value, version_of(value)))
        return value

    def _note_inputs(self) -> None:
        self._versions = [version_of(tensor) for tensor in self._inputs]

    def _compare_inputs(self) -> None:
        self.outcome.changes_outputs |= any(version_of(tensor) != version for tensor, version in self._noted)
        self.outcome.changes_inputs |= self._versions != [version_of(tensor) for tensor in self._inputs]

    def _look_at(self, values: Any, what: str) -> None:
        """Refuse what was computed from numbers drawn anew; note what from values that are not there."""
        self._unknown.refuse_drawn(values, what)
        if source := self._unknown.source_of(values):
            self.outcome.unknown.add(f"{what} from {source}")

    def _other_way(self, name: str) -> ConfigurationError:
        blocks = self._program.blocks
        expected = blocks[self._position] if self._position < len(blocks) else "the end"
        return ConfigurationError(
            f"forward of {class_name(self._model)} came to {name} where it came to {expected} with the example that"
            " pipelined(model, example) was given: it must call its layers in the same order for every batch; give an"
            " example that is like the batches (the same arguments, and in training the same switches)"
        )

    def _nothing(self, position: int, args: tuple, kwargs: dict[str, Any], alike: bool | None) -> Any:
        """What stands for a leaf of a block's output: NaN in the shape of its first tensor, NaN alone, or None."""
        if alike is None:
            return None
        first = next(leaf for leaf in leaves_of([args, kwargs]) if isinstance(leaf, Tensor))
        what = f"what {self._program.blocks[position]} returned"
        return self._unknown.nothing(what, first.shape if alike else (), first.dtype, self._program.in_place)


def _new_seed() -> int:
    drawn = torch.randint(1 << 62, ())
    try:
        return int(drawn)
    except RuntimeError:  # of a plan, whose tensors have no values
        return 0
