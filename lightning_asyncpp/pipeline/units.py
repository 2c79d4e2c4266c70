"""The ordered units of a model: what a pipeline may cut between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from lightning_asyncpp.pipeline.errors import ConfigurationError


class Unit(NamedTuple):
    """A submodule that stays whole on one stage.

    Attributes:
        name: its name in the model, as in ``state_dict`` keys.
        module: the submodule; it takes the output of the unit before it, the first one the arguments of the model.
    """

    name: str
    module: nn.Module


def pipeline_units(model: nn.Module) -> list[Unit]:
    """Return the ordered units of an ``nn.Sequential``, or of a module with ``pipeline_layers()``.

    Raises:
        ConfigurationError: the model is neither, or its layers are not distinct submodules of it.
    """
    layers = getattr(model, "pipeline_layers", None)
    if callable(layers):
        return _named_layers(model, layers)
    if isinstance(model, nn.Sequential):
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
        return [Unit(name, model.get_submodule(name)) for name in names]
    raise ConfigurationError(
        f"self.model is a {type(model).__name__}, which the pipeline cannot cut: make it an nn.Sequential, or give it"
        " pipeline_layers(), a method that returns its layers in the order in which they are applied"
    )


def _named_layers(model: nn.Module, layers: Callable[[], Sequence[nn.Module]]) -> list[Unit]:
    name_of = {id(module): name for name, module in model.named_modules()}
    modules = list(layers())
    problems = []
    if not modules:
        problems.append("it is empty")
    if any(not isinstance(module, nn.Module) or not name_of.get(id(module)) for module in modules):
        problems.append("it holds something that is not a submodule of the model")
    if len({id(module) for module in modules}) != len(modules):
        problems.append("it holds a layer twice")
    if problems:
        raise ConfigurationError(
            f"{type(model).__name__}.pipeline_layers() must return distinct submodules of the model in order:"
            f" {' and '.join(problems)}"
        )
    return [Unit(name_of[id(module)], module) for module in modules]


def spread(units: Sequence[Unit], num_stages: int) -> list[int]:
    """Number of units on each stage, units with parameters spread evenly.

    A unit without parameters (an activation function) stays on the stage of the unit before it; the first stages take
    one unit more where the count does not divide.

    Raises:
        ConfigurationError: there are fewer units with parameters than stages.
    """
    heavy = [index for index, unit in enumerate(units) if any(True for _ in unit.module.parameters())]
    if len(heavy) < num_stages:
        raise ConfigurationError(
            f"the model has {len(heavy)} layers with parameters, fewer than the {num_stages} stages: use at most"
            f" {len(heavy)} devices per replica, or return finer layers from pipeline_layers()"
        )
    size, longer = divmod(len(heavy), num_stages)
    firsts = [stage * size + min(stage, longer) for stage in range(num_stages)]
    starts = [0] + [heavy[first] for first in firsts[1:]]
    return [end - start for start, end in zip(starts, [*starts[1:], len(units)])]


def stages_of_parameters(model: nn.Module, num_stages: int) -> dict[str, int]:
    """Stage of every parameter of ``model``, by its name there, as a pipeline of so many stages cuts it.

    Raises:
        ConfigurationError: the model cannot be cut so.
    """
    units = pipeline_units(model)
    counts = spread(units, num_stages)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return {
        f"{unit.name}.{name}": stage for unit, stage in zip(units, stages) for name, _ in unit.module.named_parameters()
    }


def ownership_problems(root: nn.Module, units: Sequence[Unit], model_name: str = "self.model") -> list[str]:
    """Trainable parameters that no unit holds, which no stage would train: what they are and how to mend it."""
    owned = {id(p) for unit in units for p in unit.module.parameters()}
    homeless = [name for name, p in root.named_parameters() if p.requires_grad and id(p) not in owned]
    if not homeless:
        return []
    return [
        f"parameters outside the layers of {model_name}: {', '.join(homeless[:8])}"
        f"{' and more' if len(homeless) > 8 else ''}; the pipeline trains only what its layers hold: move them into a"
        f" layer of {model_name}, or freeze them (requires_grad=False)"
    ]


def sharing_problems(units: Sequence[Unit], counts: Sequence[int]) -> list[str]:
    """Parameters that layers of two different stages share (tied embeddings), with the mend."""
    stage_of_unit = [stage for stage, count in enumerate(counts) for _ in range(count)]
    seen: dict[int, tuple[int, str]] = {}
    problems = []
    for unit, stage in zip(units, stage_of_unit):
        for name, parameter in unit.module.named_parameters():
            first_stage, first_name = seen.setdefault(id(parameter), (stage, f"{unit.name}.{name}"))
            if first_stage != stage:
                problems.append(
                    f"{first_name} (stage {first_stage}) and {unit.name}.{name} (stage {stage}) are the same"
                    " parameter: sharing weights between stages is not supported yet; untie them (for a GPT:"
                    " tie_embeddings=False), or keep both layers on one stage"
                )
    return problems
