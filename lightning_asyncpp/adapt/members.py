"""Which submodules and parameters of a model the code around its blocks uses, and where."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_asyncpp.adapt.program import Program
from lightning_asyncpp.adapt.state import Changes
from lightning_asyncpp.adapt.trace import Trace
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.errors import ConfigurationError


class Call(NamedTuple):
    """A call of a submodule outside of blocks.

    Attributes:
        name: of the submodule.
        gap: position of the next block.
        leaves: of what it returned.
        template: of what it returned.
    """

    name: str
    gap: int
    leaves: list[Any]
    template: Any


class Members:
    """The outermost submodules in whose calls all uses of their parameters are, and parameters used by themselves.

    Args:
        model: the model.
        trace: of one forward.
        changed: name of a module -> what every forward changes in it.

    Raises:
        ConfigurationError: the code around the blocks changes something in every forward.

    Attributes:
        by_gap: gap -> names.
        calls: of the submodules, in their order.
        unused: names of what no code used.
    """

    def __init__(self, model: nn.Module, trace: Trace, changed: Changes) -> None:
        self._blocks = trace.blocks
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.by_gap: dict[int, list[str]] = {}
        whole = self._whole_modules(model, trace)
        used: set[int] = set()
        for parameter, gap, around in trace.uses:
            used.add(id(parameter))
            module = next((name for name in around if name in whole), None)
            self._add(gap, module or self._names[id(parameter)])
        for name, gap, _, _ in trace.calls:  # statistics that move with every forward
            is_moved = isinstance(model.get_submodule(name), _NormBase) or name in changed
            if is_moved and not any(_is_in(name, other) for other in whole) and not self._holds_block(name):
                whole.add(name)
                self._add(gap, name)
        self._refuse_changes(model, {name: keys for name, keys in changed.items() if not self._is_apart(name, whole)})
        modules = {name for names in self.by_gap.values() for name in names if name in whole}
        self.calls = [Call(*call) for call in trace.calls if call[0] in modules]
        self.unused = self._unused(model, used, modules)

    def used_in(self, program: Program, glue: int) -> set[str]:
        """Names that the code of a glue uses itself."""
        return {name for gap, names in self.by_gap.items() if program.glue_at(gap) == glue for name in names}

    def _holds_block(self, name: str) -> bool:
        return any(_is_in(block, name) for block in self._blocks)

    def _is_apart(self, name: str, whole: set[str]) -> bool:
        """Whether a module is, or is in, one that runs once in every forward."""
        return any(_is_in(name, other) for other in (*self._blocks, *whole))

    def _refuse_changes(self, model: nn.Module, changed: Changes) -> None:
        if changed:
            places = ", ".join(f"{name}.{key}".lstrip(".") for name, keys in changed.items() for key in keys)
            raise ConfigurationError(
                f"forward of {class_name(model)} changes {places} around its layers, each time that it runs; on"
                " every stage it runs again for each part of the code around the layers: change that in a layer, in a"
                " submodule that is called once, or in the step, or give the model pipeline_layers()"
            )

    def _add(self, gap: int, name: str) -> None:
        names = self.by_gap.setdefault(gap, [])
        if name not in names:
            names.append(name)

    def _whole_modules(self, model: nn.Module, trace: Trace) -> set[str]:
        """Submodules without a block in them, outside of whose calls nobody uses what they hold."""
        found = {name for name, *_ in trace.calls if not any(_is_in(block, name) for block in self._blocks)}
        holders = {name: {id(p) for p in model.get_submodule(name).parameters()} for name in found}
        holders = {name: held for name, held in holders.items() if held}
        for parameter, _, around in trace.uses:
            for name in [name for name, held in holders.items() if id(parameter) in held and name not in around]:
                if not self._is_second_use(model, name, parameter, around):
                    del holders[name]
        return set(holders)

    def _is_second_use(self, model: nn.Module, name: str, parameter: nn.Parameter, around: tuple[str, ...]) -> bool:
        """Whether another module that holds a tied parameter, too, is what uses it."""
        others = [other for other in around if not _is_in(other, name) and not _is_in(name, other)]
        return any(id(parameter) in {id(p) for p in model.get_submodule(other).parameters()} for other in others)

    def _unused(self, model: nn.Module, used: set[int], modules: set[str]) -> list[str]:
        inside = {id(p) for block in self._blocks for p in model.get_submodule(block).parameters()}
        inside |= {id(p) for module in modules for p in model.get_submodule(module).parameters()}
        return [name for name, p in model.named_parameters() if id(p) not in used | inside]


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
