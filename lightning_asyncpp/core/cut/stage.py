"""Stage of a model, which runs its units (parts of the model between two possible cuts) on a given set of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.own_forward import OwnForwardStage, cut_of
from lightning_asyncpp.core.cut.pruned import Place, places_of
from lightning_asyncpp.core.cut.units import Unit, use_names
from lightning_asyncpp.core.cut.whole_model import WholeModel, counting_layers
from lightning_asyncpp.core.randomness import seed_generators

T = TypeVar("T")


class Stage:
    """Units of one stage, which run on a given set of weights.

    Attributes:
        model: cut model, in which modules of other stages have no tensors.
        units: units of this stage, in order.
        first_unit: index of the first unit in the whole model, from which seeds of layers are derived.
        whole: description of the whole model.
        parameters: name in the model -> parameter, each parameter once.
        uses: name of a shared parameter in a later unit -> its name in the first unit that has it.
        root: module whose names checkpoints have: the model, or the module around it.
        names: every name of a parameter in the root -> its name in ``parameters``.
        counting_layers: name in the model -> layer with statistics.
        buffers: name in the model -> buffer that a layer with statistics changes once per update.
        runs_whole_step: whether the only unit is a whole LightningModule, whose step may call anything.
        device: device of the stage.
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
    ) -> None:
        self.model = model
        self.root = model if root is None else root
        self.index = index
        self.num_stages = num_stages
        self.units = units
        self.first_unit = first_unit
        self.whole = whole or WholeModel()
        self.counting_layers = counting_layers(units)
        self.runs_whole_step = False
        self._weights: dict[str, Tensor] | None = None  # weights that the units run on
        self.device = torch.device("cpu")  # without parameters, until the runner sets it
        self.refresh()

    def forward(self, args: tuple, kwargs: dict[str, Any], seed: int, replica: int, k: int) -> Any:
        """Apply the units in order, each with random numbers derived from (seed, unit, replica, k).

        This does not restore torch's generators.

        Args:
            args: arguments of the model; after the first stage, the output of the previous stage.
            kwargs: keyword arguments of the model.
            seed: seed of the run.
            replica: index of the data-parallel replica.
            k: number of the microbatch, counted over the run or, in evaluations, over all evaluations.
        """

        def entered(number: int) -> None:
            if number >= self.first_unit:
                self._enter(number - self.first_unit)
            seed_generators(seed, self.device, "layer", number, replica, k)

        if self._own_forward is not None:
            return self._own_forward.run(args, kwargs, entered)
        for number, (_, module, function) in enumerate(self.units, self.first_unit):
            if self._turns[number - self.first_unit]:
                self._enter(number - self.first_unit)
            seed_generators(seed, self.device, "layer", number, replica, k)
            output = module(*args, **kwargs) if function is None else function(module, *args, **kwargs)
            args, kwargs = (output,), {}
        return args[0]

    def whole_model(self) -> AbstractContextManager[None]:
        """Return a context in which placeholders, with the memory of one element, replace other stages' tensors."""
        return self.whole.pruned.showing(True)

    def copies(self) -> list[nn.Parameter]:
        """Return the parameters that an earlier stage has, too."""
        names = (tie.name_on(self.index) for tie in self.whole.ties if self.index in tie.stages[1:])
        return [self.parameters[name] for name in names]

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules of the units."""
        for unit in self.units:
            yield from unit.module.modules()

    def under(self, weights: dict[str, Tensor] | None, function: Callable[[], T]) -> T:
        """Call ``function`` while the units' parameters are ``weights`` (name in the model -> leaf tensor).

        Backwards must run within such a call, too, since activation checkpointing recomputes with the present weights.
        """
        if weights is None:
            return function()
        # Unlike torch.func.functional_call, check no names: checks would take longer than launching a layer's kernels.
        originals: list[tuple[Place, Any]] = []
        try:
            self._weights = weights
            for place, name in self._uses:
                if name in weights:
                    originals.append((place, place.table[place.key]))
                    place.table[place.key] = weights[name]
            return function()
        finally:
            self._weights = None
            for place, original in reversed(originals):  # in reverse, since a place may occur twice
                place.table[place.key] = original

    def refresh(self) -> None:
        """Find the parameters again, since a change of dtype or device may have replaced them."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.uses: dict[str, str] = {}
        self.buffers: dict[str, Tensor] = {
            f"{name}.{key}": getattr(layer, key)
            for name, layer in self.counting_layers.items()
            for key in layer.versioned_buffers
        }
        in_units = self._find_parameters()
        self._find_uses(in_units)
        name_of = {parameter: name for name, parameter in self.parameters.items()}
        named = self.root.named_parameters(remove_duplicate=False)
        self.names: dict[str, str] = {name: name_of[p] for name, p in named if p in name_of}
        first = next(iter(self.parameters.values()), None)
        self.device = self.device if first is None else first.device
        self._own_forward = self._find_own_forward()

    def update_from_statistics(self, totals: Tensor) -> None:
        """Call the layers' ``update_from_statistics``, once per applied update.

        Args:
            totals: statistics of all layers of the model, summed over the mini-batch and the replicas.
        """
        for layer in self.whole.statistics.layers:
            if layer.name in self.counting_layers:
                with torch.no_grad():
                    self.counting_layers[layer.name].update_from_statistics(layer.of(totals))
        for place, name in self._uses:
            buffer = self.buffers.get(name)
            if buffer is not None and place.table[place.key] is not buffer:  # the layer has assigned a new tensor
                buffer.data.copy_(place.table[place.key])
                place.table[place.key] = buffer

    def _find_own_forward(self) -> OwnForwardStage | None:
        cut = cut_of(self.model)
        if cut is None:
            return None
        dtype = next((p.dtype for p in self.parameters.values() if p.is_floating_point()), None)
        end = self.first_unit + len(self.units)
        with self.whole_model():
            return OwnForwardStage(self.model, cut, self.first_unit, end, self.device, dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this stage's part of the model's ``state_dict``, with names as in the whole model."""
        with self.whole.pruned.showing(False):
            return dict(self.model.state_dict())

    def _find_parameters(self) -> list[dict[int, str]]:
        """Find the units' parameters; return for each unit: id of a parameter -> name of its use in the unit."""
        name_of: dict[int, str] = {}
        in_units: list[dict[int, str]] = []
        for _, unit, use_of in use_names(self.units):
            in_units.append({})
            for name, parameter in unit.module.named_parameters():
                use = in_units[-1][id(parameter)] = use_of(name)
                canonical = name_of.setdefault(id(parameter), use)
                if canonical == use:
                    self.parameters[use] = parameter
                else:
                    self.uses[use] = canonical
        return in_units

    def _find_uses(self, in_units: list[dict[int, str]]) -> None:
        """Find all places of parameters and versioned buffers, inside and outside of the units.

        A parameter of several units has one leaf tensor per unit, so that gradients are added in the same order on any
        number of stages. A place in exactly one unit gets the unit's leaf. Any other place gets the leaf of the unit
        that runs; so do all places of such a parameter if the model's own forward runs, since any unit may use them.
        """
        self._uses: list[tuple[Place, str]] = []  # place, and key of this use in a version's weights
        self._turns: list[list[tuple[Place, str]]] = [[] for _ in self.units]
        buffers = {id(buffer): name for name, buffer in self.buffers.items()}
        units_of: dict[nn.Module, list[int]] = {}
        for offset, unit in enumerate(self.units):
            for module in unit.module.modules():
                units_of.setdefault(module, []).append(offset)
        for module in dict.fromkeys((*self.model.modules(), *self.root.modules())):
            for place in places_of(module):
                tensor = id(place.tensor)
                of_tensor = {offset: names[tensor] for offset, names in enumerate(in_units) if tensor in names}
                own = units_of.get(module, [])
                if tensor in buffers:
                    self._uses.append((place, buffers[tensor]))
                elif len(own) == 1 and own[0] in of_tensor and (len(of_tensor) == 1 or cut_of(self.model) is None):
                    self._uses.append((place, of_tensor[own[0]]))
                elif of_tensor:
                    self._uses.append((place, next(iter(of_tensor.values()))))
                    for offset, name in of_tensor.items() if len(of_tensor) > 1 else ():
                        self._turns[offset].append((place, name))

    def _enter(self, offset: int) -> None:
        """When a unit begins, put its leaves into the places that get the leaf of the unit that runs."""
        if self._weights is not None:
            for place, name in self._turns[offset]:
                if name in self._weights:
                    place.table[place.key] = self._weights[name]
