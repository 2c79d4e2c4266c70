"""Finds out what a model's forward does around its blocks, by running it again with NaN in the places of values.

It is done in evaluation and in training mode, in which the code may be another. Glue that gives the same results
without a value does not need it. So nothing has to be known of the model's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_asyncpp.adapt.draws import SameDraws
from lightning_asyncpp.adapt.examples import defaults_of, positional_names
from lightning_asyncpp.adapt.members import Members
from lightning_asyncpp.adapt.needs import Needs
from lightning_asyncpp.adapt.packing import Output, TensorTable, outputs_in, same, tensor_numbers_in, unpack
from lightning_asyncpp.adapt.program import Program, switches_of
from lightning_asyncpp.adapt.replay import Earlier, Outcome, Replay
from lightning_asyncpp.adapt.shells import Shell
from lightning_asyncpp.adapt.state import Changes, as_before
from lightning_asyncpp.adapt.trace import Trace
from lightning_asyncpp.adapt.unknown import Unknown, UnknownValueError
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.errors import ConfigurationError


class Analysis:
    """What was found of a model in one mode.

    Args:
        model: the model, in the mode in which the trace was taken.
        trace: of one forward.
        changed: name of a module -> what every forward changes in it.
        shells: name -> shell, of blocks and submodules of glue; it takes up those that it lacks.
        starts: where runs of blocks begin; it takes up those that it lacks.

    Attributes:
        program: what a pipeline needs to know of this mode.
    """

    def __init__(
        self, model: nn.Module, trace: Trace, changed: Changes, shells: dict[str, Shell], starts: list[int]
    ) -> None:
        self._model, self._trace, self._shells, self._training = model, trace, shells, model.training
        self._members = Members(model, trace, changed)
        self.program = Program(
            trace.blocks, starts, calls=[call.name for call in self._members.calls], templates=trace.templates,
            call_templates=[call.template for call in self._members.calls],
            call_gaps=[call.gap for call in self._members.calls], alike=trace.alike,
            constants=trace.table.constants, unused=self._members.unused, draws_on_host=trace.draws_on_host,
            positional=positional_names(model), defaults=defaults_of(model),
        )  # fmt: skip
        self.program.switches = switches_of(self.program.named(*self._call()))
        self.program.shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        self._unknown = next(iter(shells.values())).unknown if shells else Unknown()
        self._unknown.changed = {f"{name}.{key}" for name, keys in changed.items() for key in keys}
        names = [*trace.blocks, *self.program.modules()]
        inside = tuple(f"{name}." for name in names)
        self.program.around = [n for n, _ in model.named_modules() if n not in names and not n.startswith(inside)]
        for name in [name for name in names if name not in shells]:
            shells[name] = Shell(model.get_submodule(name), name, self._unknown)

    # -- runs -----------------------------------------------------------------------------------------------------

    def find_runs(self) -> None:
        """Split runs of blocks where code between two of them computes with what the first returned."""
        program, starts, glue = self.program, self.program.starts, 0
        while glue < len(starts):
            self._spread_members()
            numbers = [p + 1 for p in program.run_of(glue) if self._returns_numbers(p)]
            stop = min([self._first_difference(glue), *numbers])
            if stop <= program.run_of(glue)[-1]:
                starts.insert(glue + 1, stop)
            glue += 1

    def _spread_members(self) -> None:
        program = self.program
        program.members = [[] for _ in range(program.tail + 1)]
        for gap, names in self._members.by_gap.items():
            found = program.members[program.glue_at(gap)]
            found += [name for name in names if name not in found]

    def _returns_numbers(self, position: int) -> bool:
        leaves = [value for (block, _), value in self._trace.outputs.items() if block == position]
        return any(type(value) in (bool, int, float, str) for value in leaves)

    def _first_difference(self, glue: int) -> int:
        """Position of the first block behind a glue whose arguments need more than what came before the glue.

        Values that earlier glue computed from parameters are computed again.
        """
        first = self.program.run_of(glue)[0]
        names = [name for name in self.program.parameters() if name not in self.program.members[glue]]
        if (position := self._reached(glue)) == first and names:
            own = self._members.by_gap.setdefault(first, [])
            own += names
            for name in names:
                own.remove(name)
                self._spread_members()
                if self._reached(glue) == first:
                    own.append(name)
            self._spread_members()
            position = self._reached(glue)
        if position == first:
            raise ConfigurationError(
                f"{class_name(self._model)} calls {self.program.blocks[position]} with other values when its forward"
                " is run again: what a layer takes must follow from the model's arguments and its layers alone"
            )
        return position

    def _reached(self, glue: int) -> int:
        """Position of the first block behind a glue that is not called with what it should be."""
        run = self.program.run_of(glue)
        replay, table = self._replay(glue, *self._before(glue))
        try:
            self._run(replay, *self._call())
        except UnknownValueError:  # what came so far decides
            pass
        except ConfigurationError:
            raise
        except Exception:  # of code that cannot compute with what stands for outputs to come
            if not self.program.in_place:
                self.program.in_place = True
                return self._reached(glue)
        arguments = replay.outcome.arguments
        for position, packed in zip(run, arguments):
            lacks = self._drew and position > run[0] and self._computes_unknown(position, replay.outcome)
            if lacks or not self._same_arguments(position, packed, table):
                break
        else:
            position = run[0] + len(arguments)
        if replay.outcome.changed_since is not None:  # the block has to run before the code behind it does
            position = min(position, replay.outcome.changed_since + 1)
        return position

    def _computes_unknown(self, position: int, outcome: Outcome) -> bool:
        """Whether what a block takes is computed from what is not there, though it may make no difference."""
        return any(said.startswith(f"what {self.program.blocks[position]} takes ") for said in outcome.unknown)

    def _same_arguments(self, position: int, packed: Any, table: TensorTable) -> bool:
        expected, trace = self._trace.arguments[position], self._trace
        if outputs_in(packed) != outputs_in(expected):
            return False

        def mark(block: int, leaf: int) -> str:
            return f"output {block}.{leaf}"

        ours = unpack(packed, table.values, table.constants, mark)
        theirs = unpack(expected, trace.values, trace.table.constants, mark)
        return same(ours, theirs)

    # -- needs ----------------------------------------------------------------------------------------------------

    def find_needs(self) -> None:
        """What each glue needs of what came before: outputs of blocks, what submodules returned, values of the call.

        All runs of blocks are known by now.
        """
        self._spread_members()
        names = self.program.tensor_names(self._trace.call)
        numbers = tensor_numbers_in(self._trace.call)
        needs = earlier = Needs()
        for glue in range(self.program.tail + 1):
            everything = self._all_before(glue)
            # Where outputs are added up between blocks, each is needed from there on.
            needs = self._needed(glue, everything, needs & everything | Needs(calls=everything.calls - earlier.calls))
            earlier = everything
            if self._is_enough(glue, needs, by_luck=True):
                self.program.mixed |= {(glue, what) for what in self._unknown_in}
            self.program.live.append(set(needs.outputs) | self._handed_to_blocks(glue))
            self.program.live_calls.append(set(needs.calls))
            blank = everything.inputs - needs.inputs
            self.program.blank_inputs.append({name for number in blank for name in names[numbers[number]]})
        self._find_last_uses()
        self.program.costs = self._costs()

    def _needed(self, glue: int, everything: Needs, guess: Needs) -> Needs:
        """What a glue needs: little where that is enough, else a guess, else whatever is missed if it is not there."""
        needs = self._likely(glue, everything)
        if not self._is_enough(glue, needs):
            needs = needs | guess
        if not self._is_enough(glue, needs):
            self._take_parameters(glue, everything)
            missed = (one for one in everything.singly() if not self._is_enough(glue, everything - one))
            needs = needs | Needs.union(missed)
            needs = needs if self._is_enough(glue, needs) else everything
        if not self._is_enough(glue, needs, by_luck=True):
            raise ConfigurationError(self._not_enough(glue))
        for one in needs.singly():  # such as what the block before returned beside its first tensor
            if self._may_be_missed(one) and self._is_enough(glue, needs - one):
                needs = needs - one
        return needs

    def _all_before(self, glue: int) -> Needs:
        """All that could be needed; values of the call may be left out where NaN could stand for them."""
        outputs = {key for key in self._outputs_before(glue) if self._trace.outputs[key] is not None}
        calls = {n for n, call in enumerate(self._members.calls) if self.program.glue_at(call.gap) < glue}
        inputs = {n for n, t in enumerate(self._inputs()) if glue and t.is_floating_point() and t.ndim > 2}
        return Needs(frozenset(outputs), frozenset(calls), frozenset(inputs))

    def _likely(self, glue: int, everything: Needs) -> Needs:
        """The outputs of the block before, and all that NaN cannot stand for."""
        trace, calls = self._trace, self._members.calls
        last = max(self.program.run_of(glue - 1), default=-1) if glue else -1
        outputs = {key for key in everything.outputs if key[0] == last or not _may_be_nan(trace.outputs[key])}
        fixed = {n for n in everything.calls if not all(_may_be_nan(leaf) for leaf in calls[n].leaves)}
        return Needs(frozenset(outputs), frozenset(fixed), frozenset())

    def _may_be_missed(self, one: Needs) -> bool:
        """Whether NaN can stand for it, so that a result without it tells something."""
        outputs = all(_may_be_nan(self._trace.outputs[key]) for key in one.outputs)
        return outputs and all(_may_be_nan(leaf) for n in one.calls for leaf in self._members.calls[n].leaves)

    def _handed_to_blocks(self, glue: int) -> set[Output]:
        """Outputs of earlier blocks that those behind a glue take as they are."""
        run = self.program.run_of(glue)
        return {o for p in run for o in outputs_in(self._trace.arguments[p]) if not run or o[0] < run[0]}

    def _not_enough(self, glue: int) -> str:
        run = self.program.run_of(glue - 1) if glue else range(0)
        where = f"behind its layer {self.program.blocks[run[-1]]}" if run else "before its layers"
        return (
            f"the code of {class_name(self._model)} {where} comes to other results where its layers run apart: it"
            " needs what they leave behind beside their outputs (router logits, attentions, hidden states that are"
            " collected); switch that off in the model's configuration, or give the model pipeline_layers()"
        )

    def _take_parameters(self, glue: int, everything: Needs) -> None:
        """Make parameters that earlier glue uses by themselves members of a later one, too, where that needs them."""
        own, used = self.program.members[glue], self._members.used_in(self.program, glue)
        before = list(own)
        own += [name for name in self.program.parameters() if name not in own]
        if not self._is_enough(glue, everything, by_luck=True):
            own[:] = before
            return
        for name in [name for name in own if name not in before and name not in used]:
            own.remove(name)
            if not self._is_enough(glue, everything):
                own.append(name)

    def _is_enough(self, glue: int, needs: Needs, by_luck: bool = False) -> bool:
        """Whether a glue comes to the same without anything else that came before it.

        Where random numbers decide what comes to the result, all that takes part in it is needed, unless ``by_luck``.
        """
        outputs = {
            key: _copy(self._trace.outputs[key])
            for key in self._outputs_before(glue)
            if key in needs.outputs or not isinstance(self._trace.outputs[key], Tensor)
        }
        calls = [
            [
                _copy(leaf) if number in needs.calls else self._without(leaf, f"what {call.name} returned")
                for leaf in call.leaves
            ]
            for number, call in enumerate(self._members.calls)
        ]
        blank = [n for n in self._all_before(glue).inputs if n not in needs.inputs]
        replay, table = self._replay(glue, outputs, calls)
        try:
            outcome = self._run(replay, *self._call(blank))
            self.program.changes_inputs |= outcome.changes_inputs
            self.program.changes_outputs |= outcome.changes_outputs
        except UnknownValueError:
            return False
        except ConfigurationError:
            raise
        except Exception:  # of code that cannot compute with what stands for values
            if self.program.in_place:
                return False
            self.program.in_place = True
            return self._is_enough(glue, needs, by_luck)
        self._unknown_in = outcome.unknown
        return (by_luck or not (self._drew and outcome.unknown)) and self._is_right(glue, outcome, table)

    def _is_right(self, glue: int, outcome: Outcome, table: TensorTable) -> bool:
        if glue == self.program.tail:
            return same(outcome.output, self._trace.output)
        # What a block takes as it came with the call, it gets from there.
        return all(self._same_arguments(p, a, table) for p, a in zip(self.program.run_of(glue), outcome.arguments))

    def _find_last_uses(self) -> None:
        program, last = self.program, self.program.last_use
        for position, packed in enumerate(self._trace.arguments):
            for output in outputs_in(packed):
                last[output] = max(last.get(output, 0), position)
        edges = [*program.starts, len(program.blocks)]
        for glue, outputs in enumerate(program.live):
            for output in outputs:
                last[output] = max(last.get(output, 0), edges[glue])

    def _costs(self) -> list[float]:
        gaps, blocks = self._trace.operations
        around = [0.0] * (self.program.tail + 1)
        for gap, operations in enumerate(gaps):
            around[self.program.glue_at(gap)] += operations
        return [around[glue] if position is None else blocks[position] for glue, position in self.program.units()]

    # -- one replay -----------------------------------------------------------------------------------------------

    def _replay(self, glue: int, outputs: dict[Output, Any], calls: list[list[Any]]) -> tuple[Replay, TensorTable]:
        table = TensorTable(constants=self.program.constants, copies=True)
        earlier = Earlier(outputs, calls, dict.fromkeys(range(self.program.tail + 1), self._trace.seed))
        return Replay(self._model, self.program, self._shells, glue, earlier, table), table

    def _run(self, replay: Replay, args: list[Any], kwargs: dict[str, Any]) -> Outcome:
        """In the mode of the trace, from the same state and with the same random numbers."""
        if any(module.training is not self._training for module in self._model.modules()):
            self._model.train(self._training)
        with as_before(self._model), SameDraws(self._model) as drawn:
            try:
                return replay.run(args, kwargs)
            finally:
                self._drew = drawn.drew or self.program.draws_on_host

    def _before(self, glue: int) -> tuple[dict[Output, Any], list[list[Any]]]:
        """Everything that came before a glue, as it was."""
        outputs = {key: _copy(self._trace.outputs[key]) for key in self._outputs_before(glue)}
        return outputs, [[_copy(leaf) for leaf in call.leaves] for call in self._members.calls]

    def _outputs_before(self, glue: int) -> list[Output]:
        edges = [*self.program.starts, len(self.program.blocks)]
        return [key for key in self._trace.outputs if key[0] < edges[glue]]

    def _call(self, blank: Sequence[int] = ()) -> tuple[list[Any], dict[str, Any]]:
        tensors = [
            self._without(t, f"argument {n}") if n in set(blank) else t.clone() for n, t in enumerate(self._inputs())
        ]
        args, kwargs = unpack(self._trace.call, tensors, self._trace.table.constants)
        return args, kwargs

    def _without(self, value: Any, what: str) -> Any:
        """What stands for a value, if NaN can."""
        if isinstance(value, Tensor) and value.is_floating_point():
            return self._unknown.nothing(what, value.shape, value.dtype, writable=True)
        return _copy(value)

    def _inputs(self) -> list[Tensor]:
        """The tensors of the call: the first ones of the table."""
        return [self._trace.values[number] for number in tensor_numbers_in(self._trace.call)]


def _may_be_nan(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and value.is_floating_point())


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
