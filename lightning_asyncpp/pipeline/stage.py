"""Cutting a model to one stage: its own units stay, under the names that they had; the others go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.materialize import materialize
from lightning_asyncpp.pipeline.private_names import PrivateNameError
from lightning_asyncpp.pipeline.randomness import derive, seed_generators
from lightning_asyncpp.pipeline.units import Unit, ownership_problems, pipeline_units, sharing_problems, spread

T = TypeVar("T")


class OtherStage(nn.Module):
    """Stands where a unit of another stage was: it holds nothing and cannot run."""

    def __init__(self, name: str, stage: int, num_stages: int) -> None:
        super().__init__()
        self.name, self.stage, self.num_stages = name, stage, num_stages

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse to run."""
        raise RuntimeError(
            f"layer {self.name!r} lives on pipeline stage {self.stage}: call the whole model through"
            " self.model(...) in a *_step method, or gather it with strategy.full_state_dict()"
        )

    def extra_repr(self) -> str:
        """Name the layer and where it is."""
        return f"{self.name!r} on stage {self.stage}"


class _Place(NamedTuple):
    """Where a module keeps a parameter.

    Attributes:
        holder: the module's own parameters, name -> tensor.
        key: the parameter's name there.
        name: its canonical name in the model; tied parameters share one.
    """

    holder: dict[str, Any]
    key: str
    name: str


class Stage:
    """The units of one stage, and how they are run on a given set of weights.

    Attributes:
        model: the model that was cut; units of other stages are replaced by :class:`OtherStage`.
        units: this stage's units, in order.
        first_unit: index of the first of them in the whole model; random layers are seeded with it.
        parameters: name in the model -> the parameter, each parameter once.
        device: where they are.
    """

    def __init__(self, model: nn.Module, index: int, num_stages: int, units: list[Unit], first_unit: int) -> None:
        self.model = model
        self.index = index
        self.num_stages = num_stages
        self.units = units
        self.first_unit = first_unit
        self.parameters = self._canonical_parameters()
        self.device = self._find_device()

    @property
    def is_first(self) -> bool:
        """Whether batches enter here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.num_stages - 1

    def forward(self, args: tuple, kwargs: dict[str, Any], seed: int, replica: int, k: int) -> Any:
        """Apply the units in order; each draws its random numbers from (seed, unit, replica, k).

        It leaves torch's generators where the last unit left them: whoever needs them as they were preserves them.

        Args:
            args: arguments of the first unit; the others take the output of the one before.
            kwargs: keyword arguments of the first unit.
            seed: the run's seed.
            replica: index of the data-parallel replica.
            k: the micro-batch, counted over the whole run.
        """
        for offset, unit in enumerate(self.units):
            seed_generators(derive(seed, "layer", self.first_unit + offset, replica, k), self.device)
            output = unit.module(*args, **kwargs)
            args, kwargs = (output,), {}
        return args[0]

    def under(self, weights: dict[str, Tensor] | None, function: Callable[[], T]) -> T:
        """Call ``function`` while the parameters of the units are ``weights`` (name in the model -> leaf tensor).

        Backward passes run under it too: activation checkpointing recomputes with the weights that it finds.
        """
        if weights is None:
            return function()
        # What torch.func.functional_call does, without its checks of every name in every call: they take longer than
        # the launch of a layer's kernels.
        places = [place for place in self._places if place.name in weights]
        originals = [place.holder[place.key] for place in places]
        try:
            for place in places:
                place.holder[place.key] = weights[place.name]
            return function()
        finally:
            for place, original in zip(places, originals):
                place.holder[place.key] = original

    def refresh(self) -> None:
        """Look up the parameters again: moving a module to another dtype or device may have replaced them."""
        self.parameters = self._canonical_parameters()
        self.device = self._find_device()

    def _find_device(self) -> torch.device:
        return next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))

    def state_dict(self) -> dict[str, Tensor]:
        """This stage's entries of the model's ``state_dict``, with their names in the whole model."""
        return dict(self.model.state_dict())

    def _canonical_parameters(self) -> dict[str, nn.Parameter]:
        canonical: dict[str, nn.Parameter] = {}
        name_of: dict[int, str] = {}
        self._places: list[_Place] = []
        for unit in self.units:
            for name, parameter in unit.module.named_parameters(remove_duplicate=False):
                full = name_of.setdefault(id(parameter), f"{unit.name}.{name}")
                canonical.setdefault(full, parameter)
                owner, _, key = name.rpartition(".")
                self._places.append(_Place(_holder(unit.module.get_submodule(owner), key, parameter), key, full))
        return canonical


def _holder(module: nn.Module, key: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Where ``module`` keeps its own parameters: a private name of torch, looked for here and nowhere else."""
    holder = getattr(module, "_parameters", None)
    if not isinstance(holder, dict) or holder.get(key) is not parameter:
        where = f"parameter {key!r} in {type(module).__name__}._parameters"
        raise PrivateNameError("torch", where, "run a layer on the weights of another version")
    return holder


def cut(
    model: nn.Module, index: int, num_stages: int, seed: int, device: torch.device, root: nn.Module | None = None
) -> Stage:
    """Keep the units of stage ``index`` of a model, materialise their meta tensors and drop the other units.

    A model that was cut the same way before, for another Trainer of this process, is taken as it is.

    Args:
        model: an ``nn.Sequential`` or a module with ``pipeline_layers()``; it is changed in place.
        index: the stage, 0 first.
        num_stages: number of stages.
        seed: the run's seed, from which meta tensors are initialised.
        device: where they are allocated.
        root: the module around it, whose other parameters nobody would train.

    Raises:
        ConfigurationError: the model cannot be cut; all reasons are named.
    """
    units = pipeline_units(model)
    if any(isinstance(unit.module, OtherStage) for unit in units):
        return _cut_before(model, index, num_stages, units, root)
    counts = spread(units, num_stages)
    problems = ownership_problems(root if root is not None else model, units) + sharing_problems(units, counts)
    if problems:
        raise ConfigurationError.from_problems(problems)
    first = sum(counts[:index])
    own = range(first, first + counts[index])
    materialize(units, own, seed, device)
    stage_of_unit = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for position, unit in enumerate(units):
        if position not in own:
            _replace(model, unit.name, OtherStage(unit.name, stage_of_unit[position], num_stages))
    return Stage(model, index, num_stages, [units[position] for position in own], first)


def _cut_before(model: nn.Module, index: int, num_stages: int, units: list[Unit], root: nn.Module | None) -> Stage:
    others = [unit.module for unit in units if isinstance(unit.module, OtherStage)]
    own = [position for position, unit in enumerate(units) if not isinstance(unit.module, OtherStage)]
    if any(other.num_stages != num_stages or other.stage == index for other in others):
        raise ConfigurationError(
            f"self.model was already cut for {others[0].num_stages} stages and cannot be cut for {num_stages}, or not"
            " at the same place: build the module anew; a checkpoint, which holds all stages, brings its weights back"
        )
    if problems := ownership_problems(root if root is not None else model, units):
        raise ConfigurationError.from_problems(problems)
    return Stage(model, index, num_stages, [units[position] for position in own], own[0])


def _replace(model: nn.Module, name: str, substitute: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, substitute)
