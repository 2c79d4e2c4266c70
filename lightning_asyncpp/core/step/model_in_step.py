"""What a user's step does to the model: on stages that do not run the step, or not to its end, none of it happens.

Looked at are modes, weights, and the numbers, switches and names that a model keeps in attributes, or in configurations
that these refer to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.elsewhere import OtherStage
from lightning_asyncpp.core.cut.module_as_network import called_by_steps
from lightning_asyncpp.core.cut.stage import Stage

PLAIN = (bool, int, float, str, type(None))
_MOST_ENTRIES = 256  # of a configuration
_LOOKED_AT, _SAMPLED = 2, 64  # parameters, and values of each


class ModelInStep:
    """Notices what was changed in the model since :meth:`begin`.

    Args:
        stage: this rank's.
        name: how the user calls the model.

    Attributes:
        closely: whether the batch is one in which everything is looked at: the first, second, fourth, eighth, ...
    """

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name
        self._modules = list(stage.model.modules())
        self._others = [module for module in self._modules if isinstance(module, OtherStage)]
        self._units = [stage.model, *(unit.module for unit in stage.units), *self._others]
        self._middle = range(1, stage.num_stages - 1)
        # What the step does after its call, only the last stage does.
        self._unseen = [module for module in self._others if stage.is_last or module.stage in self._middle]
        own = {path: module for path, module in stage.model.named_modules() if not isinstance(module, OtherStage)}
        self._plain = PlainAttributes(own | {"": called_by_steps(stage.model)})  # whose forward may read them
        self._batches: Counter[str] = Counter()
        self.closely = True

    def begin(self, purpose: str) -> None:
        """Remember how everything is, before a batch.

        Args:
            purpose: ``"train"``, or what is evaluated.
        """
        self._batches[purpose] += 1
        # What leaves no other trace than the values costs too much for every batch.
        self.closely = self._batches[purpose].bit_count() == 1
        self._parameters = list(self._stage.parameters.values()) if purpose == "train" else []
        if self.closely:
            self._plain.find()
        self.remember()

    def remember(self) -> None:
        """Remember how everything is: before a batch, and when an update within it has changed weights."""
        self._modes, self._unit_modes = _modes(self._modules), _modes(self._units)
        self._attributes = [(module, dict(vars(module))) for module in self._unseen]
        self._values = _identities(self._unseen)
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._weights = self._read_weights()
        self._plain.remember()

    def changed(self) -> str | None:
        """What was, as far as it can be told at next to no cost."""
        return None if _modes(self._units) == self._unit_modes else self._mode_refusal()

    def changed_anywhere(self) -> str | None:
        """What was; it takes longer."""
        if _modes(self._modules) != self._modes:
            return self._mode_refusal()
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            return (
                f"requires_grad_() on parameters of {self._name} in the step: the stages that do not run the step would"
                " go on as before; freeze and unfreeze before the training, or between two trainings"
            )
        if self._read_weights() != self._weights or (self.closely and self._others_have_weights()):
            return (
                f"other weights in {self._name} while the step calls it (torch.func.functional_call, weights of an"
                " averaged model swapped in): only the stages that run the step would have them, and training runs on"
                " weight versions of its own; swap weights in hooks that run on every stage (on_validation_start and"
                " on_validation_end), or compute this in a single process (delayed_gradient)"
            )
        # With two stages both run the step up to its call.
        return self.attribute_set(self._middle) or (self._own_attribute_set() if self._middle else None)

    def called(self) -> None:
        """The model has run: what is set from now on, is set after the call."""
        self._plain.remember()

    def set_after_call(self) -> str | None:
        """What the step has set in the model after its call, which no other stage does."""
        return self.attribute_set() or self._own_attribute_set()

    def begin_transfer(self) -> None:
        """Remember how everything is, before a batch is moved to the device."""
        if self._middle:
            self._plain.remember()

    def set_with_batch(self) -> str | None:
        """What was set while a batch was moved to the device, which stages in the middle do not do."""
        return self._own_attribute_set("in a hook of the batch's transfer") if self._middle else None

    def _own_attribute_set(self, where: str = "in the step") -> str | None:
        """What was set in the model or in this stage's layers: who walks over modules means those of others, too."""
        if (changed := self._plain.changed()) is None:
            return None
        return (
            f"{self._name}.{changed} was set {where}, which not all stages run to its end: layers of other stages, and"
            " the model that these know, would go on with the old value; set it in a hook that runs on every stage,"
            " such as on_train_batch_start"
        )

    def attribute_set(self, stages: Container[int] | None = None) -> str | None:
        """What was set in layers of other stages.

        Args:
            stages: which; None: all that do not run the step to its end.
        """
        if _identities(self._unseen) == self._values:
            return None
        for module, before in self._attributes:
            for key, value in vars(module).items() if stages is None or module.stage in stages else ():
                if key != "training" and not _same(value, before.get(key, PLAIN)):
                    return (
                        f"{self._name}.{module.name}.{key} was set in the step: its layer lives on a stage that does"
                        " not run the step to its end; set it in a hook that runs on every stage, such as"
                        " on_train_batch_start"
                    )
        return None

    def _mode_refusal(self) -> str:
        return (
            f"train() or eval() on {self._name}, or on a part of it, in the step before the call: stages that do not"
            " run the step would stay in the other mode; call it in hooks that run on every stage, such as"
            " on_train_start, on_train_epoch_start or on_validation_start (with Fabric: before"
            " strategy.training_step or evaluation_step)"
        )

    def _others_have_weights(self) -> bool:
        return any(True for module in self._others for _ in module.parameters())

    def _read_weights(self) -> list[Any]:
        """Which tensors this stage's modules hold; in batches 1, 2, 4, 8, ... also whether something was written there.

        A copy into ``.data`` shows in the values alone, of which a few are read.
        """
        held = self._stage.held()
        kept: list[Any] = [id(tensor) for tensor in held]
        if self.closely:
            kept += [(tensor.data_ptr(), tensor._version) for tensor in held if not tensor.is_inference()]
            samples = [tensor.detach().reshape(-1)[:_SAMPLED] for tensor in held[:_LOOKED_AT]]
            kept += [sample.view(torch.uint8).tolist() for sample in samples]
        return kept


class PlainAttributes:
    """Tells which attribute of some modules was changed between two moments.

    Args:
        modules: name -> module.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._places: list[_Place] = []
        self._values: list[Any] = []

    def find(self) -> None:
        """Look for attributes; what is new since the last time is noticed from now on."""
        seen: set[int] = set()
        self._places = [
            place
            for path, module in self._modules.items()
            for key, value in vars(module).items()
            if key != "training" and not key.startswith("_")
            for place in _places_of(vars(module), key, f"{path}.{key}" if path else key, value, seen)
        ]

    def remember(self) -> None:
        """Take what is there now as it was before."""
        self._values = self._read()

    def changed(self) -> str | None:
        """The name of an attribute that has another value than it had; None if there is none."""
        values = self._read()
        if values == self._values:
            return None
        pairs = zip(self._places, values, self._values)
        return next((place.name for place, now, before in pairs if now is not before and now != before), None)

    def _read(self) -> list[Any]:
        return [kept_in.get(key) for kept_in, key, _ in self._places]


class _Place(NamedTuple):
    """Where a value is kept, and how messages call it."""

    kept_in: Any
    key: Any
    name: str


class _ListEntries(Mapping):
    """A list as a mapping from positions."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __getitem__(self, position: int) -> Any:
        if position < len(self._values):
            return self._values[position]
        raise KeyError(position)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._values)))

    def __len__(self) -> int:
        return len(self._values)


def _places_of(kept_in: dict[str, Any], key: str, name: str, value: Any, seen: set[int]) -> Iterator[_Place]:
    if isinstance(value, PLAIN):
        yield _Place(kept_in, key, name)
        return
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    entries = _entries(value)
    if entries is not None and len(entries) <= _MOST_ENTRIES:
        yield from (_Place(entries, k, f"{name}[{k!r}]") for k, v in entries.items() if isinstance(v, PLAIN))


def _entries(value: Any) -> Any:
    """The entries of a mutable configuration: of a mapping, a list, or an object with attributes."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list):
        return _ListEntries(value)
    return vars(value) if hasattr(value, "__dict__") else None


def _identities(modules: Sequence[nn.Module]) -> list[int]:
    """Which objects their attributes are, without a call for each: there may be many layers on other stages."""
    return list(map(id, chain.from_iterable(map(dict.values, map(vars, modules)))))


def _modes(modules: list[nn.Module]) -> list[bool]:
    return [module.training for module in modules]


def _same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and type(value) in PLAIN and value == before)
