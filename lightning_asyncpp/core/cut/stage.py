"""One stage of a model, and how its units are run on a given set of weights."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.elsewhere import Home, OtherTensor, SecondName, Uses, home_before, use_in
from lightning_asyncpp.core.cut.units import Unit, use_names
from lightning_asyncpp.core.cut.whole_model import WholeModel, counting_layers
from lightning_asyncpp.core.randomness import derive, seed_generators
from lightning_asyncpp.private_names import PrivateNameError

T = TypeVar("T")


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

    @property
    def at(self) -> tuple[int, str]:
        """The same for the same place, whatever its name in the model."""
        return id(self.holder), self.key


class _Turn(NamedTuple):
    """What a place holds while a unit runs.

    Attributes:
        place: it, with the name of the use that it means.
        instead: what it holds, if not that use's weights.
    """

    place: _Place
    instead: Tensor | None = None


class Stage:
    """The units of one stage, and how they are run on a given set of weights.

    Attributes:
        model: the model that was cut; units of other stages are replaced by :class:`OtherStage`.
        units: this stage's units, in order.
        first_unit: index of the first of them in the whole model; random layers are seeded with it.
        whole: what is known of the whole model.
        parameters: name in the model -> the parameter, each parameter once.
        uses: name of a later unit's use of a parameter -> the parameter's name.
        root: the model, or the module around it, whose names users and checkpoints know.
        names: every name that a parameter has in the root -> that of the parameter.
        elsewhere: parameters of other stages' units, as long as somebody keeps them -> where they live.
        counting_layers: name in the model -> layer, of those that count.
        buffers: name in the model -> buffer that they change once per update.
        runs_whole_step: whether its one unit is a whole LightningModule, whose step may call anything.
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
        root: nn.Module | None = None,
        outside: Sequence[SecondName] = (),
    ) -> None:
        self.model = model
        self.root = model if root is None else root
        self.index = index
        self.num_stages = num_stages
        self.units = units
        self.first_unit = first_unit
        self.whole = whole or WholeModel()
        self.counting_layers = counting_layers(units)
        self.elsewhere: list[tuple[weakref.ref[Tensor], Home]] = []
        self._outside = outside
        self.runs_whole_step = False
        self._weights: dict[str, Tensor] | None = None  # those that the units run on
        self.device = torch.device("cpu")  # of layers without parameters their runner knows it
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
            self._enter(offset)
            seed_generators(derive(seed, "layer", self.first_unit + offset, replica, k), self.device)
            args, kwargs = (unit.apply(args, kwargs),), {}
        return args[0]

    def whole_model(self) -> AbstractContextManager[None]:
        """Have the layers of other stages, without memory, in their places meanwhile."""
        return self.whole.hidden.shown()

    def copies(self) -> list[nn.Parameter]:
        """Parameters that a stage before has, too."""
        names = (tie.name_on(self.index) for tie in self.whole.ties if self.index in tie.stages[1:])
        return [self.parameters[name] for name in names]

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the units."""
        for unit in self.units:
            yield from unit.module.modules()

    def held(self) -> list[Tensor]:
        """What the modules of the units hold now, in the places of their parameters and versioned buffers."""
        return [place.holder[place.key] for place in self._places]

    def replaced(self) -> list[str]:
        """Names of the parameters that are not any more where they were at the start."""
        own = ((place, self.parameters.get(self.uses.get(place.name, place.name))) for place in self._places)
        return [place.name for place, p in own if p is not None and place.holder.get(place.key) is not p]

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
            self._weights = weights
            for place in places:
                place.holder[place.key] = weights[place.name]
            return function()
        finally:
            self._weights = None
            for place, original in zip(places, originals):
                place.holder[place.key] = original

    def refresh(self) -> None:
        """Look up the parameters again: moving a module to another dtype or device may have replaced them."""
        self._places: list[_Place] = []
        self._turns: list[list[_Turn]] = []  # by unit: the places that mean another one's use before or after it
        self.parameters: dict[str, nn.Parameter] = {}
        self.uses: dict[str, str] = {}
        self.buffers: dict[str, Tensor] = {}
        self._find_parameters()
        self._find_buffers()
        self._find_second_names()
        name_of = {parameter: name for name, parameter in self.parameters.items()}
        named = self.root.named_parameters(remove_duplicate=False)
        self.names: dict[str, str] = {name: name_of[p] for name, p in named if p in name_of}
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
        return next((parameter.device for parameter in self.parameters.values()), self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """This stage's entries of the model's ``state_dict``, with their names in the whole model."""
        with self.whole.hidden.hidden():
            return dict(self.model.state_dict())

    def _find_parameters(self) -> None:
        name_of: dict[int, str] = {}
        found: list[list[_Place]] = []
        for _, unit, use_of in use_names(self.units):
            in_unit: dict[int, str] = {}
            found.append([])
            for name, parameter in unit.module.named_parameters(remove_duplicate=False):
                full = in_unit.setdefault(id(parameter), use_of(name))
                canonical = name_of.setdefault(id(parameter), full)
                if canonical == full:
                    self.parameters[full] = parameter
                else:
                    self.uses[full] = canonical
                owner, _, key = name.rpartition(".")
                holder = _holder(unit.module.get_submodule(owner), "_parameters", key, parameter)
                found[-1].append(_Place(holder, key, full))
        self._places += itertools.chain(*found)
        units_at = Counter(place.at for places in found for place in {p.at: p for p in places}.values())
        self._turns = [[_Turn(place) for place in places if units_at[place.at] > 1] for places in found]

    def _find_buffers(self) -> None:
        for layer_name, layer in self.counting_layers.items():
            for key in layer.versioned_buffers:
                buffer = getattr(layer, key)
                self.buffers[f"{layer_name}.{key}"] = buffer
                self._places.append(_Place(_holder(layer, "_buffers", key, buffer), key, f"{layer_name}.{key}"))

    def _find_second_names(self) -> None:
        """Have second names outside of the units stand for what these hold now."""
        for module, key, uses in self._outside:
            name = use_in(uses, 0)
            if name in self.parameters:
                parameter = self.parameters[name]
                if getattr(module, key) is not parameter:
                    setattr(module, key, parameter)
                place = _Place(_holder(module, "_parameters", key, parameter), key, name)
                self._places.append(place)
                self._take_turns(module, key, uses, place)
            elif getattr(module, key).is_meta:  # and that of the unit is not any more
                setattr(module, key, self.model.get_buffer(name))
            if name in self.buffers:
                self._places.append(_Place(_holder(module, "_buffers", key, self.buffers[name]), key, name))

    def _take_turns(self, module: nn.Module, key: str, uses: Uses, place: _Place) -> None:
        """Have a second name mean each unit's use in turn, and none before the first where another stage holds it."""
        home = home_before(self.whole.ties, self.index, place.name)
        instead = None
        if home is not None:
            path = next(path for path, m in self.root.named_modules() if m is module)
            tensor = self.parameters[place.name]
            instead = OtherTensor.of(tensor.shape, tensor.dtype, f"{path}.{key}" if path else key, home)
        for position, turn in enumerate(self._turns if len(uses) > 1 or home is not None else ()):
            is_before = position < min(uses)
            turn.append(_Turn(place._replace(name=use_in(uses, position)), instead if is_before else None))

    def _enter(self, offset: int) -> None:
        """Have the places that several units use mean this one's use."""
        if self._weights is not None:
            for place, instead in self._turns[offset]:
                if place.name in self._weights:
                    place.holder[place.key] = self._weights[place.name] if instead is None else instead


def _holder(module: nn.Module, kept_in: str, key: str, tensor: Tensor) -> dict[str, Any]:
    """Where ``module`` keeps its own parameters or buffers: private names of torch, looked for here alone."""
    holder = getattr(module, kept_in, None)
    if not isinstance(holder, dict) or holder.get(key) is not tensor:
        where = f"{key!r} in {type(module).__name__}.{kept_in}"
        raise PrivateNameError("torch", where, "run a layer on the weights of another version")
    return holder
