"""Parameters and buffers of other stages: None in their modules, and back in place for uses of the whole model.

An optimizer is made from the whole model, so it finds the parameters of all stages, in their order and under their
names, on every one of them. They take no memory: each keeps one element that stands for all of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TABLES = ("_parameters", "_buffers")  # of every module: private names of torch, used here alone


class Place(NamedTuple):
    """Place where a module keeps a tensor.

    Attributes:
        table: the module's own parameters or buffers, name -> tensor.
        key: its name there.
        tensor: what is there.
    """

    table: dict[str, Any]
    key: str
    tensor: Tensor


def places_of(module: nn.Module) -> list[Place]:
    """Return the places of a module's own parameters and buffers."""
    tables = [vars(module)[name] for name in TABLES]
    return [Place(table, key, tensor) for table in tables for key, tensor in table.items() if tensor is not None]


class Pruned:
    """Parameters and buffers that one stage of a model does not hold.

    Attributes:
        stage: the one that is left; -1 as long as the model is whole.
        names: of what was taken out, in the ``state_dict`` of the root.
        places: where it was, under all names.
        shown_now: whether it is there.
    """

    def __init__(self) -> None:
        self.stage = -1
        self.names: set[str] = set()
        self.shown_now = False
        self.places: list[Place] = []

    def prune(self, root: nn.Module, stage: int, tensors: Iterable[Tensor], modules: Container[nn.Module] = ()) -> None:
        """Take tensors out of a module, under every name that it has for them, and give their memory back.

        Args:
            root: what was cut, or the module around it.
            stage: the one that is left.
            tensors: of the others.
            modules: that hold nothing from now on, nor what the stage shares with them.
        """
        self.stage = stage
        gone = {id(tensor) for tensor in tensors}
        self._take_out(root, lambda module, place: module in modules or id(place.tensor) in gone, gone)

    def prune_alike(self, root: nn.Module, copy: nn.Module, model: nn.Module) -> None:
        """Take out of a whole copy of the model, which may be in the root, what is gone from the model."""
        gone = {(id(place.table), place.key) for place in self.places}
        twin_of = dict(zip(copy.modules(), model.modules()))

        def is_gone(module: nn.Module, place: Place) -> bool:
            tables = [vars(twin_of[module])[name] for name in TABLES] if module in twin_of else ()
            return any((id(table), place.key) in gone for table in tables)

        places = [(module, place) for module in copy.modules() for place in places_of(module)]
        kept = {id(place.tensor) for module, place in places if not is_gone(module, place)}
        self._take_out(root, is_gone, {id(place.tensor) for _, place in places} - kept)

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load this stage's part of a whole ``state_dict``.

        Args:
            module: what was cut, or the module around it, as when it was pruned.
            state: name -> tensor.
            strict: whether the names must agree.

        Raises:
            RuntimeError: they do not.
        """
        own = {name: value for name, value in state.items() if name not in self.names}
        missing, unexpected = module.load_state_dict(own, strict=False)
        unexpected = [name for name in unexpected if name not in self.names]  # some modules add what older states lack
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state_dict does not fit {type(module).__name__}: missing {missing}, unexpected {unexpected};"
                " build the model that was saved, or load with strict=False (in a LightningModule strict_loading)"
            )

    def _take_out(self, root: nn.Module, is_gone: Callable[[nn.Module, Place], bool], released: Container[int]) -> None:
        found: dict[tuple[int, str], Place] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            for place in places_of(module):
                if is_gone(module, place):
                    self.names.add(f"{path}.{place.key}".lstrip("."))
                    found[id(place.table), place.key] = place
        for place in found.values():
            if id(place.tensor) in released and isinstance(place.tensor, nn.Parameter):
                release_memory(place.tensor)
            elif id(place.tensor) in released:
                place = place._replace(tensor=without_memory(place.tensor))
            self.places.append(place)
        self.show(self.shown_now)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have all of it in its places meanwhile."""
        with self._be(True):
            yield

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Have None there meanwhile."""
        with self._be(False):
            yield

    @contextmanager
    def _be(self, shown: bool) -> Iterator[None]:
        before = self.shown_now
        self.show(shown)
        try:
            yield
        finally:
            self.show(before)

    def show(self, shown: bool) -> None:
        """Have it in its places from now on, or None."""
        self.shown_now = shown
        for place in self.places:
            place.table[place.key] = place.tensor if shown else None


def fill(parameter: nn.Parameter, value: Tensor) -> bool:
    """Give a parameter on the meta device memory in place, so that it is the same for whoever holds it.

    Returns:
        Whether that is possible: not where something holds a weak reference to it, as RNNs of torch do, nor where the
        value is of a class of its own, such as a fake tensor.
    """
    if type(value) is not Tensor or weakref.getweakrefcount(parameter):
        return False
    filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(filled).update(vars(parameter))
    torch.utils.swap_tensors(parameter, filled)
    return True


def release_memory(parameter: nn.Parameter) -> None:
    """Leave a parameter one element that stands for all of them, in place: optimizers that hold it still know it."""
    if parameter.is_meta:
        fill(parameter, without_memory(parameter))
    else:
        parameter.data = without_memory(parameter)


def without_memory(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape that takes one element.

    Args:
        tensor: the other one.
        device: by default the same, or the CPU, if that is the meta device.
        dtype: by default the same.
    """
    device = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
    return torch.zeros((), dtype=dtype or tensor.dtype, device=device).expand(tensor.shape)
