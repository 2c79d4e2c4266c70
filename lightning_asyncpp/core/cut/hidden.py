"""Other stages' layers behind their placeholders: without memory, and shown to whoever asks for the whole model.

An optimizer is made from the whole model, so it finds the parameters of all stages, in their order and under their
names, on every one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpp.private_names import required


class _Place(NamedTuple):
    """Where a placeholder is.

    Attributes:
        holder: the module that has it.
        key: its name there.
        original: the module, parameter or buffer that was there.
        placeholder: what is there instead.
        order: names of the holder's own parameters, in order.
    """

    holder: nn.Module
    key: str
    original: Any
    placeholder: Any
    order: tuple[str, ...]

    def hide(self) -> None:
        if isinstance(self.original, Tensor):
            delattr(self.holder, self.key)
        setattr(self.holder, self.key, self.placeholder)

    def show(self) -> None:
        if not isinstance(self.original, Tensor):
            setattr(self.holder, self.key, self.original)
            return
        delattr(self.holder, self.key)
        if not isinstance(self.original, nn.Parameter):
            self.holder.register_buffer(self.key, self.original)
            return
        self.holder.register_parameter(self.key, self.original)
        parameters = required(self.holder, "_parameters", "number the parameters of the whole model")
        for name in self.order:
            if name in parameters:
                parameters[name] = parameters.pop(name)


class HiddenLayers:
    """The layers of other stages that placeholders stand for.

    Attributes:
        shown_now: whether they are in their places.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self.shown_now = False

    def hide(self, root: nn.Module, name: str, placeholder: Any) -> None:
        """Put a placeholder where a module, a parameter or a buffer is.

        Args:
            root: the module that holds it.
            name: dotted name of it there.
            placeholder: what takes its place.
        """
        path, _, key = name.rpartition(".")
        holder = root.get_submodule(path)
        own = tuple(dict(holder.named_parameters(recurse=False, remove_duplicate=False)))
        self._places.append(_Place(holder, key, getattr(holder, key), placeholder, own))
        self._places[-1].hide()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the layers in their places meanwhile."""
        with self._be(True):
            yield

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Have the placeholders there meanwhile."""
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
        """Have the layers there from now on, or the placeholders."""
        if shown and not self.shown_now:
            for place in reversed(self._places):
                place.show()
        elif self.shown_now and not shown:
            for place in self._places:
                place.hide()
        self.shown_now = shown


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


def release_buffers(layer: nn.Module, uses: Container[Tensor] = ()) -> None:
    """Leave the buffers of a layer one element each, but for those in ``uses``."""
    for module in layer.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer not in uses:
                setattr(module, name, without_memory(buffer))


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype that takes one element; on the CPU, if the other is on the meta device."""
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
