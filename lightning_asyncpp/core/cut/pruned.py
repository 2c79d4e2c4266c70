"""Parameters and buffers of other stages: None in their modules, but put back when the whole model is needed.

An optimizer is created from the whole model, so on every stage it finds the parameters of all stages in the same order
and under the same names. Parameters of other stages take almost no memory: one element is expanded to their shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TABLES = ("_parameters", "_buffers")  # private attributes of torch's modules
_EXTRA_STATE = "_extra_state"  # torch's name for what a module's get_extra_state() returns


class Place(NamedTuple):
    """Place where a module keeps a tensor.

    Attributes:
        table: the module's direct parameters or buffers, name -> tensor.
        key: name of the tensor in the table.
        tensor: the tensor.
    """

    table: dict[str, Any]
    key: str
    tensor: Tensor


def places_of(module: nn.Module) -> list[Place]:
    """Return the places of a module's parameters and buffers, without those of its children."""
    tables = [vars(module)[name] for name in TABLES]
    return [Place(table, key, tensor) for table in tables for key, tensor in table.items() if tensor is not None]


class Pruned:
    """Parameters and buffers that were removed from a model, since they belong to other stages.

    Attributes:
        stage: index of the remaining stage; -1 while the model is whole.
        names: names of the removed tensors in the ``state_dict`` of the root, and of their modules' extra state; see
            :meth:`prune`.
        places: all former places of the removed tensors.
        shown_now: whether the removed tensors are in their places.
    """

    def __init__(self) -> None:
        self.stage = -1
        self.names: set[str] = set()
        self.shown_now = False
        self.places: list[Place] = []

    def prune(self, root: nn.Module, stage: int, tensors: Iterable[Tensor], modules: Container[nn.Module] = ()) -> None:
        """Remove tensors from all of their places in a module, and free their memory.

        Args:
            root: cut model, or module around it.
            stage: index of the remaining stage.
            tensors: tensors of other stages.
            modules: modules that lose all their tensors, including tensors shared with this stage.
        """
        self.stage = stage
        gone = {id(tensor) for tensor in tensors}
        self._take_out(root, lambda module, place: module in modules or id(place.tensor) in gone, gone)

    def prune_alike(self, root: nn.Module, copy: nn.Module, model: nn.Module) -> None:
        """Remove from a copy of the whole model the tensors that were removed from the model.

        Args:
            root: module that contains the copy, or the copy itself; removed names are those in its ``state_dict``.
            copy: copy of the whole model, such as an average of its weights.
            model: the cut model.
        """
        gone = {(id(place.table), place.key) for place in self.places}
        twin_of = dict(zip(copy.modules(), model.modules()))

        def is_gone(module: nn.Module, place: Place) -> bool:
            tables = [vars(twin_of[module])[name] for name in TABLES] if module in twin_of else ()
            return any((id(table), place.key) in gone for table in tables)

        places = [(module, place) for module in copy.modules() for place in places_of(module)]
        kept = {id(place.tensor) for module, place in places if not is_gone(module, place)}
        self._take_out(root, is_gone, {id(place.tensor) for _, place in places} - kept)

    def without_removed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` of the root without the entries of other stages."""
        return {name: value for name, value in state.items() if name not in self.names}

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load this stage's part of a whole ``state_dict``.

        Args:
            module: cut model or module around it, the same as ``root`` in :meth:`prune`.
            state: name -> tensor.
            strict: whether names must match exactly.

        Raises:
            RuntimeError: names or shapes do not match.
        """
        missing, unexpected = module.load_state_dict(self.without_removed(state), strict=False)
        # While loading, some modules add entries that older states lack. Such an entry may belong to another stage.
        missing, unexpected = ([name for name in names if name not in self.names] for names in (missing, unexpected))
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state_dict does not fit {type(module).__name__}: missing {missing}, unexpected {unexpected};"
                " build the model that was saved, or load with strict=False (in a LightningModule,"
                " strict_loading=False)"
            )

    def _take_out(self, root: nn.Module, is_gone: Callable[[nn.Module, Place], bool], released: Container[int]) -> None:
        found: dict[tuple[int, str], Place] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            for place in places_of(module):
                if is_gone(module, place):
                    extra = [_EXTRA_STATE] if type(module).get_extra_state is not nn.Module.get_extra_state else []
                    self.names.update(f"{path}.{key}".lstrip(".") for key in (place.key, *extra))
                    found[id(place.table), place.key] = place
        for place in found.values():
            if id(place.tensor) in released and isinstance(place.tensor, nn.Parameter):
                release_memory(place.tensor)
            elif id(place.tensor) in released:
                place = place._replace(tensor=without_memory(place.tensor))
            self.places.append(place)
        self.show(self.shown_now)

    @contextmanager
    def showing(self, shown: bool) -> Iterator[None]:
        """Put the removed tensors, or None, into their places within a context."""
        before = self.shown_now
        self.show(shown)
        try:
            yield
        finally:
            self.show(before)

    def show(self, shown: bool) -> None:
        """Put the removed tensors, or None, into their places."""
        self.shown_now = shown
        for place in self.places:
            place.table[place.key] = place.tensor if shown else None


def fill(parameter: nn.Parameter, value: Tensor) -> bool:
    """Give a parameter on the meta device a value in place, so that all references to the parameter see the value.

    Returns:
        Whether this was possible. It is impossible if there are weak references to the parameter, as in torch's RNNs,
        or if the value's class is a subclass of Tensor, such as torch's fake tensors.
    """
    if type(value) is not Tensor or weakref.getweakrefcount(parameter):
        return False
    filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(filled).update(vars(parameter))
    torch.utils.swap_tensors(parameter, filled)
    return True


def release_memory(parameter: nn.Parameter) -> None:
    """Reduce a parameter's memory to one element, in place, so that references in optimizers stay valid."""
    if parameter.is_meta:
        fill(parameter, without_memory(parameter))
    else:
        parameter.data = without_memory(parameter)


def without_memory(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the same shape with the memory of one element.

    Args:
        tensor: tensor with the shape.
        device: device of the result; default: the device of ``tensor``, or the CPU if the tensor is on the meta device.
        dtype: dtype of the result; default: the dtype of ``tensor``.
    """
    device = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
    return torch.zeros((), dtype=dtype or tensor.dtype, device=device).expand(tensor.shape)
