"""Finds out where a model may be cut whose own forward runs on every stage, by running it with an example.

Each block is taken for a stage of its own. Where gradients arrive tells what the code of a stage uses: weights around
the blocks, and outputs of earlier blocks. Then the stages run as they would in a pipeline, with nothing else than that;
equality with the whole model decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.examples import Call
from lightning_asyncpp.adapt.runs import (
    Leaves,
    ModelRuns,
    Result,
    as_before,
    backward,
    difference,
    equal,
    loss_of,
    received,
)
from lightning_asyncpp.core.batches.structure import flatten
from lightning_asyncpp.core.batches.tree import map_tensors, tensors_of
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.core.cut.own_forward import OwnForwardCut, TensorFacts
from lightning_asyncpp.core.cut.pruned import places_of
from lightning_asyncpp.core.randomness import generator_states
from lightning_asyncpp.errors import ConfigurationError

_SMALL = 50_000_000  # parameters; of larger models only gradients around the blocks are computed
Needs = tuple[frozenset[int], ...]


def find_cut(model: nn.Module, call: Call, blocks: Sequence[str]) -> tuple[OwnForwardCut, list[float]]:
    """Find how a model may be cut, and floating-point operations of its units.

    Args:
        model: with real weights; it stays as it is.
        call: arguments of an example.
        blocks: names, in the order of their calls.

    Raises:
        ConfigurationError: cut so, it computes something else.
    """
    with as_before(model):
        return _Analysis(model, call, blocks).find()


class _Analysis:
    def __init__(self, model: nn.Module, call: Call, blocks: Sequence[str]) -> None:
        self.model, self.runs, self.num_units = model, ModelRuns(model, call), len(blocks) + 1
        inside = {id(p) for name in blocks for p in model.get_submodule(name).parameters()}
        self.around = {id(p): name for name, p in model.named_parameters() if id(p) not in inside}
        is_small = sum(p.numel() for p in model.parameters()) <= _SMALL
        for parameter in model.parameters():  # frozen weights have a place, too; through biases gradients go on
            wanted = is_small or id(parameter) in self.around or parameter.ndim < 2
            parameter.requires_grad_(parameter.is_floating_point() and wanted)
        everything = tuple(frozenset(range(unit)) for unit in range(self.num_units))
        units, num_blocks = ((),) * self.num_units, len(blocks)
        self.cut = OwnForwardCut(tuple(blocks), units, (None,) * num_blocks, everything, draws_between=False)
        self.in_turn: list[set[int]] = []
        self.changed: dict[str, int] = {}
        self.needed: set[int | str] = set()  # arguments of which a later unit than the first one uses the values

    def find(self) -> tuple[OwnForwardCut, list[float]]:
        """The cut, and costs."""
        try:
            with self.runs.mode(training=False), torch.no_grad():
                evaluated = self._whole()
            with self.runs.mode(training=True):
                trained = self._whole()
                self._note_uses_in_turn()
        except RuntimeError as error:
            raise ConfigurationError(f"it cannot be run forward and backward with the example ({error})") from error
        found, why = None, ""
        try:
            found = next((c for c in self._candidates() if not self._differs(c, trained, evaluated)), None)
            why = "" if found else self._differs(list(self._candidates())[-1], trained, evaluated)
        except Exception as error:  # of code that cannot compute with what stands for values
            why = f"{type(error).__name__}: {error}"
        if found is None:
            raise self._refusal(why)
        with self.runs.mode(training=False):
            costs = self.runs.costs(self.cut)
        costs[found.num_units - 1 :] = [sum(costs[found.num_units - 1 :])]
        return self._without_values(found, trained, evaluated), costs

    def _candidates(self) -> Iterator[OwnForwardCut]:
        """Cuts to try, the leanest first."""
        before = tuple(frozenset({unit - 1} if unit else ()) for unit in range(self.num_units))
        with self.runs.mode(training=True):
            used, needs = self._uses()
        if needs != before:
            in_turn = [*self.in_turn[:-2], self.in_turn[-2] | self.in_turn[-1]]
            by_inputs = replace(self._with_members(in_turn), needs=before[:-1], by_inputs=True)
            yield replace(by_inputs, blank=frozenset(self._real_arguments()))
            yield by_inputs
        yield self._with_uses(used, needs, before)
        self.cut = replace(self.cut, copies=True)
        yield self._with_uses(used, needs, before)
        with self.runs.mode(training=False):
            used_then, needed_then = self._uses()
        used = [a | b for a, b in zip(used, used_then)]
        needs = tuple(a | b for a, b in zip(needs, needed_then))
        yield self._with_uses(used, needs, before)
        nobodys = self.around.keys() - set().union(*used)
        yield self._with_uses([of_unit | nobodys for of_unit in used], self.cut.needs, before)

    def _with_uses(self, used: Sequence[set[int]], needs: Needs, before: Needs) -> OwnForwardCut:
        return replace(self._with_members(used), needs=needs, is_exact=needs == before and list(used) == self.in_turn)

    def _with_members(self, used: Sequence[set[int]]) -> OwnForwardCut:
        nobodys = self.around.keys() - set().union(*used)
        all_used = enumerate([*used[:-1], used[-1] | nobodys])
        return replace(self.cut, around=tuple(tuple(self._members(number, of_unit)) for number, of_unit in all_used))

    def _note_uses_in_turn(self) -> None:
        """Note what the code of each unit does while it runs in the whole model.

        That is: which parameters around blocks it uses, which buffers it changes, and whether it draws random numbers.
        """
        places = [place for module in self.model.modules() for place in places_of(module)]
        parameters = [place for place in places if id(place.tensor) in self.around]
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if not _touches(name, self.cut.blocks)}
        leaves: list[dict[int, Tensor]] = []
        states: list[Tensor] = []

        def entered(unit: int) -> None:
            self._note_changes(unit - 1, buffers)
            self.runs.seed(unit)
            states.append(self._state())
            once = {id(place.tensor): place.tensor for place in parameters}
            leaves.append({key: nn.Parameter(tensor.detach()) for key, tensor in once.items()})
            for table, key, tensor in parameters:
                table[key] = leaves[-1][id(tensor)]

        def note_draws(*_: Any) -> None:
            self.cut = replace(
                self.cut, draws_between=self.cut.draws_between or not torch.equal(self._state(), states[-1])
            )

        with ExitStack() as hooks:
            for name in self.cut.blocks:
                hooks.callback(self.model.get_submodule(name).register_forward_pre_hook(note_draws).remove)
            try:
                output = self.runs.forward(self.cut, entered, lambda: self._note_changes(self.num_units - 1, buffers))
            finally:
                for table, key, tensor in parameters:
                    table[key] = tensor
        loss_of(output).backward()
        self.runs.take_gradients()
        self.in_turn = [{key for key, leaf in of_unit.items() if leaf.grad is not None} for of_unit in leaves]

    def _note_changes(self, unit: int, buffers: dict[str, Tensor]) -> None:
        """Note which buffers the code of a unit has changed; those are its own."""
        for name, before in buffers.items():
            now = attrgetter(name)(self.model)
            if name not in self.changed and not equal(now, before):
                self.changed[name] = max(unit, 0)

    def _state(self) -> Tensor:
        cpu, device = generator_states(self.runs.device)
        return cpu if device is None else device

    def _without_values(self, cut: OwnForwardCut, *expected: Result) -> OwnForwardCut:
        """The cut whose later stages do without the values of as many arguments as they can."""
        real = [key for key in self._real_arguments() if key not in self.needed]
        for blank in (real, *([key] for key in real)) if real else ():
            lean = replace(cut, blank=cut.blank | frozenset(blank))
            if not self._differs(lean, *expected):
                cut = lean
                if blank is real:
                    break
        return cut

    def _real_arguments(self) -> list[int | str]:
        """Positions and names of arguments that hold real numbers."""
        args, kwargs = self.runs.call
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        return [key for key, value in given.items() if any(t.is_floating_point() for t in tensors_of(value))]

    def _differs(self, cut: OwnForwardCut, trained: Result, evaluated: Result) -> str:
        """What comes out otherwise where stages have what the cut gives them."""
        try:
            with self.runs.mode(training=True):
                if what := difference(trained, self.runs.in_stages(cut)):
                    return what
            with self.runs.mode(training=False), torch.no_grad():
                what = difference(evaluated, self.runs.in_stages(cut))
                return what or (self._differs_with_other_signs(cut) if cut.by_inputs else "")
        except Exception as error:  # of code that cannot compute with what stands for values
            return f"{type(error).__name__}: {error}"

    def _differs_with_other_signs(self, cut: OwnForwardCut) -> str:
        """The same with negative arguments: relu behind a block leaves positive ones as they are, by luck."""
        args, kwargs = map_tensors(lambda t: -t if t.is_floating_point() else t, self.runs.call)
        others = ModelRuns(self.model, (args, kwargs))
        expected = Result(others.forward(self.cut, others.seed))
        return difference(expected, others.in_stages(cut))

    def _refusal(self, what: str) -> ConfigurationError:
        blocks = self.cut.blocks
        layers = ", ".join(["...", *dict.fromkeys(_in_lists(blocks)), "..."])
        return ConfigurationError(
            f"{class_name(self.model)}, run in its own forward on each stage with its blocks {blocks[0]} to"
            f" {blocks[-1]} shared among them, does not compute what it does as a whole ({what}): code around the"
            f" blocks needs what they leave behind beside what they return. Switch that off, or say what a stage runs:"
            f" def pipeline_layers(self): return [{layers}]"
        )

    # -- the model as a whole -------------------------------------------------------------------------------------

    def _whole(self) -> Result:
        """Run the model's own forward, and note what its blocks return."""
        with self._noting_outputs():
            output = self.runs.forward(self.cut, self.runs.seed)
        if not torch.is_grad_enabled():
            return Result(output)
        loss_of(output).backward()
        return Result(output, self.runs.take_gradients())

    @contextmanager
    def _noting_outputs(self) -> Iterator[None]:
        outputs: dict[str, Any] = {}

        def note(name: str) -> Callable[..., None]:
            return lambda _module, _args, output: outputs.update({name: map_tensors(_facts_of, output)})

        hooks = [self.model.get_submodule(name).register_forward_hook(note(name)) for name in self.cut.blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.cut = replace(self.cut, outputs=tuple(outputs.get(name) for name in self.cut.blocks))

    # -- the model in stages --------------------------------------------------------------------------------------

    def _uses(self) -> tuple[list[set[int]], Needs]:
        """Of every unit, ids of the parameters around blocks and numbers of the earlier blocks that get a gradient.

        It notes which arguments no unit but the first one needs, as far as gradients tell.
        """
        made: list[tuple[tuple[Tensor, ...], bytes]] = []
        arrived: list[list[Leaves]] = []
        final: Any = None
        for unit in range(self.num_units):
            pairs = [received(tensors, structure) for tensors, structure in made]
            arrived.append([leaves for _, leaves in pairs])
            values = {str(number): value for number, (value, _) in enumerate(pairs)}
            final = self.runs.run_unit(self.cut, unit, [*self._arguments(), values] if unit else None)
            if unit + 1 < self.num_units:
                made.append(flatten(final[2][str(unit)], self.cut.blocks[unit]))
        used: list[set[int]] = [set() for _ in range(self.num_units)]
        self.runs.take_gradients()
        loss_of(final).backward()
        for unit in reversed(range(self.num_units)):
            if unit + 1 < self.num_units:
                backward(made[unit][0], [leaves[unit] for leaves in arrived[unit + 1 :]])
            names = self.runs.take_gradients()
            used[unit] = {id(p) for n, p in self.model.named_parameters() if n in names and id(p) in self.around}
        found = [[n for n, leaves in enumerate(g) if any(leaf.grad is not None for leaf in leaves)] for g in arrived]
        return used, tuple(map(frozenset, found))

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Those of the call, noted where they get a gradient."""

        def noted(value: Any, key: int | str) -> Any:
            def leaf(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor.clone()
                fresh = tensor.detach().requires_grad_()
                fresh.register_hook(lambda _: self.needed.add(key))
                return fresh.clone()

            return map_tensors(leaf, value)

        args, kwargs = self.runs.call
        return [noted(v, key) for key, v in enumerate(args)], {key: noted(v, key) for key, v in kwargs.items()}

    def _members(self, number: int, used: set[int]) -> list[str]:
        """Names of what a unit holds around its block.

        Submodules all of whose parameters are among those that it uses, other such parameters, and buffers that its
        code changes.
        """
        found: list[str] = []
        missing = {self.around[key]: key for key in self.around if key in used}
        outside = [name for name, _ in self.model.named_modules() if name and not _touches(name, self.cut.blocks)]
        for name in sorted(outside, key=lambda name: name.count(".")):
            module = self.model.get_submodule(name)
            parameters = {id(p) for p in module.parameters()}
            own = [key for key in missing if key.startswith(f"{name}.")]  # by its first name, if it is tied
            if own and parameters <= used and not any(name.startswith(f"{other}.") for other in found):
                found.append(name)
                for key in own:
                    del missing[key]
        return [*found, *missing, *(name for name, unit in self.changed.items() if unit == number)]


def _facts_of(tensor: Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tensor.dtype)


def _touches(name: str, blocks: Sequence[str]) -> bool:
    """Whether a module is around a block, in one, or one itself."""
    return any(f"{block}.".startswith(f"{name}.") or name.startswith(f"{block}.") for block in blocks)


def _in_lists(blocks: Sequence[str]) -> Iterator[str]:
    """Blocks as code that lists them would say it."""
    for block in blocks:
        holder, _, key = block.rpartition(".")
        yield f"*self.{holder}" if holder and key.isdigit() else f"self.{block}"
