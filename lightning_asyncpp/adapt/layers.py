"""The layers of a model that is cut by its program: what ``pipeline_layers()`` returns for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.contexts import entered
from lightning_asyncpp.adapt.packing import Output, TensorTable, check_structure, taken, tensor_numbers_in, unpack
from lightning_asyncpp.adapt.program import Program
from lightning_asyncpp.adapt.replay import Earlier, Outcome, Replay
from lightning_asyncpp.adapt.shells import Shell
from lightning_asyncpp.adapt.unknown import UnknownValueError
from lightning_asyncpp.core.batches.tree import leaves_of, map_tensors, tensors_of
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.core.cut.units import is_placeholder
from lightning_asyncpp.core.wire.header import DTYPES
from lightning_asyncpp.errors import ConfigurationError

Carried = dict[str, Any]
"""What one layer returns and the next one takes: ``tensors`` of the call, and ``env``, those that glue has made, with
``until``, the position of the block after which nobody needs each of them;
``call``, the model's arguments; ``arguments`` of blocks, and ``which`` of them each block takes; ``contexts`` in which
blocks run; ``seeds`` by glue, of random numbers; ``asked``, the blocks whose shape and dtype were taken for those of
the example; ``outputs`` of blocks that are still needed; ``calls``, leaves of what submodules returned in earlier
glue."""
_DTYPES = {str(dtype): dtype for dtype in DTYPES}


class PipelineLayers:
    """Stands as ``pipeline_layers`` in a model, and is called as a method would be.

    Args:
        model: the model.
        programs: what is known of its forward in evaluation mode (False), and in training (True); they have the same
            blocks and runs of them.
        shells: name -> shell.
        unused: names of parameters that no forward uses.
    """

    def __init__(
        self, model: nn.Module, programs: Mapping[bool, Program], shells: Mapping[str, Shell], unused: Sequence[str]
    ) -> None:
        self.model, self.programs, self.shells = model, programs, shells
        self._unknown = next(iter(shells.values())).unknown
        self._members = [_outermost(names) for names in zip(*(p.members for p in programs.values()))]
        self._members[-1] += unused

    @property
    def program(self) -> Program:
        """Of the mode that the model is in."""
        return self.programs[self.model.training]

    def __call__(self) -> list[Any]:
        """The layers: blocks, and before, between and after their runs what glue uses."""
        self._look_at_weights()
        if missing := [name for name in self.program.blocks if not _is_there(self.model, name)]:
            raise ConfigurationError(
                f"{', '.join(missing)}: no longer in the {class_name(self.model)} that pipelined() was called with;"
                " change its layers before"
            )
        layers: list[Any] = []
        for glue, position in self.program.units():
            if position is None:
                members = [_found(self.model, name) for name in self._members[glue]]
                layers.append((members, partial(self._glue, glue)))
            else:
                layers.append((self.model.get_submodule(self.program.blocks[position]), partial(self._block, position)))
        return layers

    def _look_at_weights(self) -> None:
        """Take over the dtypes that weights have by now, before a pipeline takes those of other stages away."""
        if any(is_placeholder(module) for module in self.model.modules()):
            return
        for name, shell in self.shells.items():
            if _is_there(self.model, name):
                shell.look_at(self.model.get_submodule(name))
        for program in self.programs.values():
            program.shapes |= {name: (tuple(p.shape), p.dtype) for name, p in self.model.named_parameters()}

    # -- glue -----------------------------------------------------------------------------------------------------

    def _glue(self, glue: int, members: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if glue == 0:
            kwargs = with_switches(self.model, kwargs)
            self.program.check_call(args, kwargs, class_name(self.model))
            table = TensorTable(constants=self.program.constants)
            call = table.pack([list(args), kwargs], class_name(self.model))
            self._unknown.device = _device_of(table.tensors)
            earlier, given = Earlier(), list(table.tensors)
        else:
            carried = args[0]
            given = [carried["tensors"], carried["env"], carried["outputs"]]
            self._unknown.device = _device_of([carried["outputs"], carried["tensors"], carried["env"]])
            table = TensorTable(
                [self._restored(t, f"argument {n}") for n, t in enumerate(carried["tensors"])], self.program.constants
            )
            call = carried["call"]
            args, kwargs = unpack(call, table.tensors, self.program.constants)
            tensors = [*table.tensors, *carried["env"]]
            known = [
                [self._restored(unpack(leaf, tensors, ()), f"what {name} returned") for leaf in leaves]
                for name, leaves in zip(self.program.calls, carried["calls"])
            ]
            seeds = {int(key): seed for key, seed in carried["seeds"].items()}
            earlier = Earlier({_read(key): value for key, value in carried["outputs"].items()}, known, seeds)
        if self.program.changes_inputs:  # which the next glue is to find as they came
            args, kwargs = map_tensors(Tensor.clone, [list(args), dict(kwargs)])
        before = len(table.tensors)
        outcome = Replay(self.model, self.program, self.shells, glue, earlier, table).run(args, kwargs)
        for what, is_changed, is_expected in (
            ("its arguments", outcome.changes_inputs, self.program.changes_inputs),
            ("what its layers took or returned", outcome.changes_outputs, self.program.changes_outputs),
            ("what its layers take", outcome.changed_since is not None, False),
        ):
            if is_changed and not is_expected:
                raise ConfigurationError(
                    f"forward of {class_name(self.model)} changes {what} in place, which it did not with the example"
                    " that pipelined(model, example) was given: give an example that is like the batches"
                )
        other = [what for what in sorted(outcome.unknown) if (glue, what) not in self.program.mixed]
        if outcome.unknown and not other:  # what comes to the same with the example may not do so now
            results = outcome.output if glue == self.program.tail else table.tensors[before:]
            if _holds_nan(results) and not _holds_nan(given):
                other = sorted(outcome.unknown)
        if other:
            raise UnknownValueError(
                f"the code around the model's layers computes {other[0]}, but that is on another pipeline stage, as"
                " with the example that pipelined(model, example) was given it did not: give an example that is like"
                " the batches, or the model pipeline_layers()"
            )
        if glue == self.program.tail:
            return outcome.output
        return self._carried(glue, table, call, outcome, earlier)

    def _carried(self, glue: int, table: TensorTable, call: Any, outcome: Outcome, earlier: Earlier) -> Carried:
        later = range(glue + 1, self.program.tail + 1)
        needed = set().union(*(self.program.live[g] for g in later))
        start = self.program.run_of(glue)[0]
        inputs = len(tensor_numbers_in(call))
        blank = set.intersection(*(self.program.blank_inputs[g] for g in later)) if later else set()
        names = self.program.tensor_names(call) if blank else {}
        distinct: list[Any] = []
        for arguments in outcome.arguments:
            if arguments not in distinct:
                distinct.append(arguments)
        all_calls = [
            [table.pack(leaf, self.program.calls[number]) for leaf in leaves]
            if any(number in self.program.live_calls[g] for g in later)
            else [_shape_of(leaf) for leaf in leaves]
            for number, leaves in enumerate([*earlier.calls, *outcome.calls])
        ]
        which = [distinct.index(arguments) for arguments in outcome.arguments]
        numbers = [tensor_numbers_in(arguments) for arguments in distinct]
        in_run = set().union(*numbers)
        until = dict.fromkeys(range(inputs, len(table.tensors)), -1)
        for position, number in zip(self.program.run_of(glue), which):
            until |= dict.fromkeys(numbers[number], position)
        until |= dict.fromkeys(tensor_numbers_in(all_calls), len(self.program.blocks))
        return {
            "tensors": [
                _shape_of(t) if blank and names[number] <= blank and number not in in_run else t
                for number, t in enumerate(table.tensors[:inputs])
            ],
            "env": table.tensors[inputs:],
            "until": [until[number] for number in range(inputs, len(table.tensors))],
            "call": call,
            "arguments": distinct,
            "which": which,
            "seeds": {str(g): seed for g, seed in [*earlier.seeds.items(), (glue, outcome.seed)] if seed is not None},
            "contexts": outcome.contexts,
            "asked": sorted(outcome.asked),
            "outputs": {
                _write(output): value
                for output, value in earlier.outputs.items()
                if output in needed or self.program.last_use.get(output, -1) >= start
            },
            "calls": all_calls,
        }  # fmt: skip

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _block(self, position: int, block: nn.Module, carried: Carried) -> Carried:
        start = self.program.starts[self.program.glue_at(position)]
        outputs = {_read(key): value for key, value in carried["outputs"].items()}

        def output_of(of_block: int, leaf: int) -> Any:
            if (of_block, leaf) not in outputs:
                raise ConfigurationError(
                    f"{self.program.blocks[position]} takes what {self.program.blocks[of_block]} returned, which it did"
                    " not with the example that pipelined(model, example) was given: give one that is like the batches"
                )
            return outputs[of_block, leaf]

        arguments = carried["arguments"][carried["which"][position - start]]
        tensors = [*carried["tensors"], *carried["env"]]
        args, kwargs = unpack(arguments, tensors, self.program.constants, output_of)
        with entered(carried["contexts"][position - start]):
            returned = block(*args, **kwargs)
        self._look_at_output(position, returned, (args, kwargs), position in carried["asked"])
        outputs |= {(position, leaf): value for leaf, value in enumerate(leaves_of(returned))}
        outputs |= {(position, number): tensor for number, tensor in taken(args, kwargs).items()}
        kept = {_write(key): value for key, value in outputs.items() if self.program.last_use.get(key, -1) > position}
        env = [tensor if until > position else None for tensor, until in zip(carried["env"], carried["until"])]
        return {**carried, "env": env, "outputs": kept}

    def _look_at_output(self, position: int, returned: Any, taken: Any, is_asked: bool) -> None:
        """Refuse what a block returned where code around it was told something else of it."""
        name = self.program.blocks[position]
        check_structure(self.program.templates[position], returned, name)
        first = next(tensors_of(taken), None)
        if not is_asked or first is None:
            return
        for leaf, alike in zip(leaves_of(returned), self.program.alike[position]):
            if alike and (leaf.shape, leaf.dtype) != (first.shape, first.dtype):
                raise ConfigurationError(
                    f"{name} returned {leaf.dtype} {list(leaf.shape)} for {first.dtype} {list(first.shape)}, and with"
                    " the example that pipelined(model, example) was given it kept both, for which code around the"
                    " layers asks; give an example that is like the batches, or the model pipeline_layers()"
                )

    def _restored(self, leaf: Any, what: str) -> Any:
        """A stand-in where only the shape was kept: of its full size, as the code around may change it in place."""
        if type(leaf) is dict and leaf.get("@") == "blank":
            return self._unknown.nothing(what, leaf["shape"], _DTYPES[leaf["dtype"]], writable=True)
        return leaf


def with_switches(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a model without a cache of keys and values, which a training does not use."""
    if hasattr(getattr(model, "config", None), "use_cache"):
        return {"use_cache": False, **kwargs}
    return dict(kwargs)


def _outermost(names: Sequence[Sequence[str]]) -> list[str]:
    """Several lists in one, without what is in others of them."""
    found = list(dict.fromkeys(itertools.chain(*names)))
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _is_there(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(_found(model, name), nn.Module)
    except AttributeError:
        return False


def _found(model: nn.Module, name: str) -> Any:
    """A submodule or a parameter, or what stands where it was."""
    found: Any = model
    for key in name.split("."):
        if is_placeholder(found):
            break
        found = getattr(found, key)
    return found


def _shape_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return {"@": "blank", "shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _holds_nan(values: Any) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in tensors_of(values))


def _device_of(values: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_of(values)), torch.device("cpu"))


def _write(output: Output) -> str:
    return f"{output[0]}.{output[1]}"


def _read(key: str) -> Output:
    block, _, leaf = key.partition(".")
    return int(block), int(leaf)
