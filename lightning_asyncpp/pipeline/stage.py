"""Cutting a model to one stage: its own units stay, under the names that they had; the others go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.materialize import materialize
from lightning_asyncpp.pipeline.randomness import derive, seed_generators
from lightning_asyncpp.pipeline.statistics import counting_layers
from lightning_asyncpp.pipeline.units import (
    Unit,
    collective_problems,
    meta_problems,
    ownership_problems,
    pipeline_units,
    spread,
)
from lightning_asyncpp.pipeline.whole_model import WholeModel
from lightning_asyncpp.private_names import PrivateNameError

T = TypeVar("T")


class OtherStage(nn.Module):
    """Stands where a unit of another stage was: it holds nothing and cannot run."""

    def __init__(self, name: str, stage: int, num_stages: int, whole: WholeModel | None = None) -> None:
        super().__init__()
        self.name, self.stage, self.num_stages = name, stage, num_stages
        self.whole = whole or WholeModel()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse to run."""
        raise RuntimeError(self._elsewhere())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            # Not before it has its attributes: a copy is made without them.
            where = f": {self._elsewhere()}" if "num_stages" in vars(self) else ""
            raise AttributeError(f"{error}{where}") from None

    def _elsewhere(self) -> str:
        return (
            f"layer {self.name!r} lives on pipeline stage {self.stage}: call the whole model through"
            " self.model(...) in a *_step method, or gather it with strategy.full_state_dict()"
        )

    def extra_repr(self) -> str:
        """Name the layer and where it is."""
        return f"{self.name!r} on stage {self.stage}"


class _Place(NamedTuple):
    """Where a module keeps a parameter or a buffer.

    Attributes:
        holder: the module's own parameters or buffers, name -> tensor.
        key: its name there.
        name: its name in the model; for a parameter that other modules of the unit share, the first one's.
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
        whole: what is known of the whole model.
        parameters: name in the model -> the parameter, each parameter once.
        uses: name of a later unit's use of a parameter -> the parameter's name.
        names: every name that a parameter has in the model -> that of it, or of a later unit's use.
        counting_layers: name in the model -> layer, of those that count.
        buffers: name in the model -> buffer that they change once per update.
        device: where they are.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        num_stages: int,
        units: list[Unit],
        first_unit: int,
        whole: WholeModel | None = None,
    ) -> None:
        self.model = model
        self.index = index
        self.num_stages = num_stages
        self.units = units
        self.first_unit = first_unit
        self.whole = whole or WholeModel()
        self.counting_layers = counting_layers(units)
        self.refresh()

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
            args, kwargs = (unit.apply(args, kwargs),), {}
        return args[0]

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the units."""
        for unit in self.units:
            yield from unit.module.modules()

    def held(self) -> list[Tensor]:
        """What the modules of the units hold now, in the places of their parameters and versioned buffers."""
        return [place.holder[place.key] for place in self._places]

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
        self._places: list[_Place] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.uses: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.buffers: dict[str, Tensor] = {}
        self._find_parameters()
        self._find_buffers()
        self.device = self._find_device()

    def update_from_statistics(self, totals: Tensor) -> None:
        """Let the layers that count change their buffers, once per update that is applied.

        Args:
            totals: what all layers of the model counted, summed over the mini-batch and the replicas.
        """
        for layer in self.whole.statistics.layers:
            if layer.name in self.counting_layers:
                with torch.no_grad():
                    self.counting_layers[layer.name].update_from_statistics(layer.of(totals))
        for place in self._places:
            if place.name in self.buffers:
                self._keep(place, self.buffers[place.name])

    def _keep(self, place: _Place, buffer: Tensor) -> None:
        """Have a buffer's new value where its versions are, even if a layer put another tensor in its place."""
        if place.holder[place.key] is not buffer:
            buffer.data.copy_(place.holder[place.key])
            place.holder[place.key] = buffer

    def _find_device(self) -> torch.device:
        return next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))

    def state_dict(self) -> dict[str, Tensor]:
        """This stage's entries of the model's ``state_dict``, with their names in the whole model."""
        return dict(self.model.state_dict())

    def _find_parameters(self) -> None:
        name_of: dict[int, str] = {}
        for unit in self.units:
            in_unit: dict[int, str] = {}
            for name, parameter in unit.module.named_parameters(remove_duplicate=False):
                full = self.names[f"{unit.name}.{name}"] = in_unit.setdefault(id(parameter), f"{unit.name}.{name}")
                canonical = name_of.setdefault(id(parameter), full)
                if canonical == full:
                    self.parameters[full] = parameter
                else:
                    self.uses[full] = canonical
                owner, _, key = name.rpartition(".")
                holder = _holder(unit.module.get_submodule(owner), "_parameters", key, parameter)
                self._places.append(_Place(holder, key, full))

    def _find_buffers(self) -> None:
        for layer_name, layer in self.counting_layers.items():
            for key in layer.versioned_buffers:
                buffer = getattr(layer, key)
                self.buffers[f"{layer_name}.{key}"] = buffer
                self._places.append(_Place(_holder(layer, "_buffers", key, buffer), key, f"{layer_name}.{key}"))


def _holder(module: nn.Module, kept_in: str, key: str, tensor: Tensor) -> dict[str, Any]:
    """Where ``module`` keeps its own parameters or buffers: private names of torch, looked for here alone."""
    holder = getattr(module, kept_in, None)
    if not isinstance(holder, dict) or holder.get(key) is not tensor:
        where = f"{key!r} in {type(module).__name__}.{kept_in}"
        raise PrivateNameError("torch", where, "run a layer on the weights of another version")
    return holder


def cut(
    model: nn.Module,
    index: int,
    num_stages: int,
    seed: int,
    device: torch.device,
    root: nn.Module | None = None,
    counts: Sequence[int] | None = None,
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
        counts: units on each stage; None spreads those with parameters evenly.

    Raises:
        ConfigurationError: the model cannot be cut; all reasons are named.
    """
    units = pipeline_units(model)
    before = whole_before(units, index, num_stages)
    if before is not None:
        return _cut_before(model, index, units, before, counts, root)
    counts = spread(units, num_stages) if counts is None else counts
    whole, problems = WholeModel.of(units, counts)
    problems = ownership_problems(root if root is not None else model, units) + problems
    problems += meta_problems(root if root is not None else model, units) + collective_problems(units)
    if problems:
        raise ConfigurationError.from_problems(problems)
    first = sum(counts[:index])
    own = range(first, first + counts[index])
    materialize(units, [*own, *_sharing_with(units, own)], seed, device)
    stage_of_unit = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for position, unit in enumerate(units):
        if position not in own:
            _replace(model, unit.name, OtherStage(unit.name, stage_of_unit[position], num_stages, whole))
    return Stage(model, index, num_stages, [units[position] for position in own], first, whole)


def _sharing_with(units: list[Unit], own: range) -> list[int]:
    """Units of other stages that share parameters with this one's: what they hold in common, all must initialise."""
    held = {id(parameter) for position in own for parameter in units[position].module.parameters()}
    others = (position for position in range(len(units)) if position not in own)
    return [p for p in others if any(id(parameter) in held for parameter in units[p].module.parameters())]


def whole_before(units: Sequence[Unit], index: int, num_stages: int) -> WholeModel | None:
    """What is known of a model that was cut before; None if it is whole.

    Args:
        units: of the model.
        index: the stage that is to be cut.
        num_stages: number of stages.

    Raises:
        ConfigurationError: it was cut for another number of stages, or another stage of it is here.
    """
    others = [unit.module for unit in units if isinstance(unit.module, OtherStage)]
    if any(other.num_stages != num_stages or other.stage == index for other in others):
        raise ConfigurationError(
            f"self.model was already cut for {others[0].num_stages} stages and cannot be cut for {num_stages}, or not"
            " at the same place: build the module anew; a checkpoint, which holds all stages, brings its weights back"
        )
    return others[0].whole if others else None


def _cut_before(
    model: nn.Module,
    index: int,
    units: list[Unit],
    whole: WholeModel,
    counts: Sequence[int] | None,
    root: nn.Module | None,
) -> Stage:
    if counts is not None and tuple(counts) != whole.counts:
        raise ConfigurationError(
            f"self.model was already cut with partition={list(whole.counts)} and cannot be cut with"
            f" partition={list(counts)}: use the same, or build the module anew; a checkpoint, which holds all stages,"
            " brings its weights back"
        )
    if problems := ownership_problems(root if root is not None else model, units):
        raise ConfigurationError.from_problems(problems)
    first = sum(whole.counts[:index])
    return Stage(model, index, len(whole.counts), units[first : first + whole.counts[index]], first, whole)


def _replace(model: nn.Module, name: str, substitute: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, substitute)
