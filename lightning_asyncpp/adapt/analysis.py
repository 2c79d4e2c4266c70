"""Search, by trial runs on an example, for a cut of a model without ``pipeline_layers()``.

Every stage runs the model's own ``forward`` (see :mod:`lightning_asyncpp.core.cut.own_forward`). A unit is a block with
the code before or after it; in the trials each unit is a stage. In the first trial, every stage has all weights and
receives every value that could cross the cut before it. Gradients show which weights and values a stage uses. In the
second trial, every stage has only what it uses. The cut is accepted if its outputs equal those of the whole model, and
its gradients differ by rounding at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.runs import Call, ModelRuns, Result, compare, equal
from lightning_asyncpp.core.cut.network import class_name
from lightning_asyncpp.core.cut.own_forward import OwnForwardCut
from lightning_asyncpp.core.tree import leaves_of, map_tensors, tensors_of
from lightning_asyncpp.errors import ConfigurationError

_SMALL = 50_000_000  # number of parameters; in larger models, matrices inside the blocks get no gradient


def find_cut(model: nn.Module, call: Call, blocks: Sequence[str]) -> tuple[OwnForwardCut, list[float]]:
    """Return a cut of a model, and the number of floating-point operations of each unit.

    Args:
        model: model with real weights; their ``requires_grad`` and ``grad`` change.
        call: arguments of an example.
        blocks: names of the blocks, in the order of their calls.

    Raises:
        ConfigurationError: no cut between the blocks computes the same as the whole model.
    """
    analysis = _Analysis(model, call, tuple(blocks))
    cut = analysis.find()
    analysis.runs.train(False)
    return cut, analysis.runs.costs(cut)


class _Analysis:
    def __init__(self, model: nn.Module, call: Call, blocks: tuple[str, ...]) -> None:
        self.model, self.blocks, self.runs = model, blocks, ModelRuns(model, call)
        self.inside = [{id(p) for p in model.get_submodule(name).parameters()} for name in blocks]
        in_blocks = set().union(*self.inside)
        self.around = [name for name, p in model.named_parameters() if id(p) not in in_blocks]
        is_small = sum(p.numel() for p in model.parameters()) <= _SMALL
        # Frozen parameters get gradients, too. In a large model the blocks' matrices get none, since gradients of
        # biases and norms suffice to keep the blocks in the autograd graph.
        for name, parameter in model.named_parameters():
            wanted = is_small or parameter.ndim < 2 or name in self.around
            parameter.requires_grad_(parameter.is_floating_point() and wanted)
            parameter.grad = None

    def find(self) -> OwnForwardCut:
        """Return a cut with the whole model's results; cuts with fewer transfers and weights are tried first."""
        cuts: list[OwnForwardCut] = []
        errors: list[Exception] = []
        # Explore cuts that send outputs of blocks. If that fails, or several outputs cross one cut, explore cuts that
        # send inputs, too.
        for by_inputs in (False, True):
            try:
                explored = self._explored(by_inputs)
            except Exception as error:
                errors.append(error)
                continue
            cuts = [self._with_rest(explored, everywhere=False), self._with_rest(explored, everywhere=True), *cuts]
            if max(map(len, explored.crossing)) <= 1:
                break
        for cut in cuts:
            try:
                expected = self._of_whole(cut)
                return self._without_values(self._tried(cut, *expected), *expected)
            except Exception as error:  # code may fail on placeholders for values of earlier stages
                errors.append(error)
        why = f"{type(errors[-1]).__name__}: {errors[-1]}".removeprefix("ConfigurationError: ")
        raise ConfigurationError(
            f"{class_name(self.model)} cannot be cut between its blocks {self.blocks[0]} to {self.blocks[-1]} ({why}):"
            " code around the blocks may use only what the blocks return, not attributes that the blocks set, may not"
            " choose blocks by values, and may draw random numbers only from torch's generators. Switch off the code"
            " that breaks this rule, name other lists of blocks with pipelined(..., blocks=[...]), or give the model"
            " pipeline_layers()"
        )

    def _explored(self, by_inputs: bool) -> OwnForwardCut:
        """Return a cut whose units have the parameters and inputs that they use, as gradients show."""
        self.runs.train(True)
        num_units = len(self.blocks) + (not by_inputs)
        cut = OwnForwardCut(self.blocks, ((),) * num_units, (), (), by_inputs)
        taken, outputs, changed = self._observed(cut)
        before: list[frozenset[int]] = [frozenset()] * num_units
        everything = [taken.get(name, frozenset()) for name in self.blocks]
        if not by_inputs:  # the previous block's output is sent even without a gradient
            before = [frozenset(range(max(unit - 1, 0), unit)) for unit in range(num_units)]
            everything = [frozenset(range(unit)) for unit in range(num_units)]
        cut = replace(cut, outputs=tuple(outputs.get(name, ((), None)) for name in self.blocks))
        found = self.runs.in_stages(replace(cut, crossing=tuple(everything)), has_all=True)
        # Outside of its block, a unit has the parameters that it uses and the buffers that it changes.
        around = [
            (
                *(name for name, p in self.model.named_parameters() if name in gradients and id(p) not in own),
                *(name for name, owner in changed.items() if owner == unit),
            )
            for unit, (gradients, own) in enumerate(zip(found.gradients, [*self.inside, set[int]()]))
        ]
        crossing = tuple(arrived | last for arrived, last in zip(found.crossing, before))
        return replace(cut, around=tuple(around), crossing=crossing)

    def _observed(
        self, cut: OwnForwardCut
    ) -> tuple[dict[str, frozenset[int]], dict[str, tuple[Sequence[int], Any]], dict[str, int]]:
        """Observe a run of the whole model.

        Returns:
            Three mappings. Name of a block -> positions of activations among its inputs. Name of a block -> its output,
            as in ``OwnForwardCut.outputs``. Name of a buffer around the blocks -> index of the unit that changes it.
        """
        taken: dict[str, frozenset[int]] = {}
        outputs: dict[str, Any] = {}
        changed: dict[str, int] = {}
        inside = {id(b) for name in self.blocks for b in self.model.get_submodule(name).buffers()}
        buffers = {name: b for name, b in self.model.named_buffers() if id(b) not in inside}

        def called(name: str, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            leaves = enumerate(leaves_of((args, kwargs)))
            taken[name] = frozenset(at for at, leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
            first = next((tensor.shape for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()), ())
            outputs[name] = tuple(first), map_tensors(lambda t: torch.empty_like(t, device="meta"), output)

        def entered(unit: int) -> None:
            for name, buffer in buffers.items():
                if name not in changed and not equal(attrgetter(name)(self.model), buffer):
                    changed[name] = max(unit - 1, 0)

        with ExitStack() as hooks:
            for name in self.blocks:
                block = self.model.get_submodule(name)
                hook = block.register_forward_hook(lambda _, *call, name=name: called(name, *call), with_kwargs=True)
                hooks.callback(hook.remove)
            self.runs.forward(cut, entered)
        return taken, outputs, changed

    def _with_rest(self, cut: OwnForwardCut, everywhere: bool) -> OwnForwardCut:
        """Return the cut; the last unit or all units also get the parameters that no unit is known to use."""
        used = set().union(*cut.around)
        rest = tuple(name for name in self.around if name not in used)
        last = len(cut.around) - 1
        around = [(*names, *(rest if everywhere or unit == last else ())) for unit, names in enumerate(cut.around)]
        return replace(cut, around=tuple(around))

    def _of_whole(self, cut: OwnForwardCut) -> tuple[Result, Result]:
        """Return the results of the whole model in evaluation and in training."""
        self.runs.train(False)
        with torch.no_grad():
            evaluated = self.runs.whole(cut)
        self.runs.train(True)
        return evaluated, self.runs.whole(cut)

    def _tried(self, cut: OwnForwardCut, evaluated: Result, trained: Result) -> OwnForwardCut:
        """Raise if the cut's results differ from the whole model's; return the cut with a value for ``is_exact``."""
        self.runs.train(False)
        with torch.no_grad():
            compare(evaluated, self.runs.in_stages(cut))
        self.runs.train(True)
        has_same_uses = compare(trained, self.runs.in_stages(cut))
        return replace(cut, is_exact=has_same_uses and max(map(len, cut.crossing)) <= 1)

    def _without_values(self, cut: OwnForwardCut, *expected: Result) -> OwnForwardCut:
        """Return the cut with arguments marked as ``blank`` if later stages do not need their floating-point values."""
        args, kwargs = self.runs.call
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in arguments:
            if any(tensor.is_floating_point() for tensor in tensors_of(value)):
                with suppress(Exception):
                    cut = self._tried(replace(cut, blank=cut.blank | {key}), *expected)
        return cut
