"""What forwards leave in a model for the next ones: running means, counters, memories; and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.draws import SameDraws
from lightning_asyncpp.adapt.packing import same
from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.cut.module_as_network import called_by_steps, class_name
from lightning_asyncpp.errors import ConfigurationError

_INTERNAL = frozenset(vars(nn.Module()))
_NUMBERS = (bool, int, float, str)
Changes = dict[str, list[str]]
"""Name of a module -> names of its buffers and attributes."""


@contextmanager
def as_before(model: nn.Module, kept: Sequence[str] = ()) -> Iterator[None]:
    """Have a model's buffers and attributes be what they were afterwards.

    Args:
        model: forwards of it are run meanwhile.
        kept: names of its attributes that may stay.
    """
    modules = [called_by_steps(module) for module in model.modules()]
    noted = [(module, dict(vars(module)), _tensors_of(module)) for module in modules]
    copies = [{key: tensor.detach().clone() for key, tensor in tensors.items()} for _, _, tensors in noted]
    containers = [(value, value.copy()) for module in modules for value in _containers_of(module).values()]
    try:
        yield
    finally:
        for container, content in containers:
            _fill(container, content)
        for (module, attributes, tensors), values in zip(noted, copies):
            for key, tensor in tensors.items():
                if not same(tensor, values[key]):
                    with torch.no_grad():
                        tensor.copy_(values[key])
                if getattr(module, key, None) is not tensor:
                    setattr(module, key, tensor)
            for key in [key for key in vars(module) if key not in _INTERNAL and key not in kept]:
                if key not in attributes:
                    del vars(module)[key]
                elif vars(module)[key] is not attributes[key]:
                    vars(module)[key] = attributes[key]


def changed_by_forwards(
    model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any],
    modes: Mapping[nn.Module, bool],
) -> Changes:  # fmt: skip
    """What each forward changes again, even with the same arguments, as a cache would not; in training mode.

    Args:
        model: as it is left, see :func:`as_before`.
        blocks: names of its blocks, in which numbers that are assigned count as changed, whatever they are.
        args: of an example.
        kwargs: of an example.
        modes: of its modules, as the user left them: whether they are in training mode.

    Raises:
        ConfigurationError: it computes with a tensor that an earlier forward left in an attribute, or sets modes.
    """
    model.train()
    try:
        _run(model, args, kwargs)
        _refuse_modes(model, modes)
        before = {name: _State(module) for name, module in model.named_modules()}
        inside = [m for name in blocks for m in model.get_submodule(name).modules()]
        with _marked(inside) as assigned:
            output = _run(model, args, kwargs)
        found = {name: before[name].changes(m) for name, m in model.named_modules() if name in before}
        memories = {name: before[name].new_tensors(m) for name, m in model.named_modules() if name in before}
        for name, module in model.named_modules():
            found[name] = list(dict.fromkeys([*found.get(name, []), *assigned.get(id(module), [])]))
        if any(memories.values()):
            _refuse_memories(model, memories, output, args, kwargs)
    except ConfigurationError:
        raise
    except Exception:  # of a model that takes other arguments in training
        return {}
    finally:
        model.eval()
    return {name: keys for name, keys in found.items() if keys}


def _refuse_modes(model: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """Refuse a forward that has put submodules into evaluation mode that the user had left in training mode."""
    others = [name for name, module in model.named_modules() if modes.get(module, False) and not module.training]
    if others:
        raise ConfigurationError(
            f"forward of {class_name(model)} puts {others[0] or 'the model'} into evaluation mode, of which layers on"
            " other stages would not know: call eval() on it in __init__ instead, or in on_train_epoch_start, after"
            " which it stays so"
        )


def _run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = map_tensors(Tensor.clone, list(args)), map_tensors(Tensor.clone, dict(kwargs))
    with SameDraws(model):
        return type(model).forward(model, *args, **kwargs)


def _refuse_memories(model: nn.Module, memories: Changes, output: Any, args: Any, kwargs: Any) -> None:
    for name, keys in memories.items():
        for key in keys:
            attributes = vars(called_by_steps(model.get_submodule(name)))
            attributes[key] = torch.full_like(attributes[key], float("nan"))
    if not same(_run(model, args, kwargs), output):
        places = ", ".join(f"{name}.{key}".lstrip(".") for name, keys in memories.items() for key in keys)
        raise ConfigurationError(
            f"forward of {class_name(model)} computes with what the forward before left in {places}: stages run"
            " forwards of several micro-batches at a time; give it as an argument, or give the model pipeline_layers()"
        )


class _Marked(int):
    """A whole number that is told from an equal one by its type."""


@contextmanager
def _marked(modules: Sequence[nn.Module]) -> Iterator[dict[int, list[str]]]:
    """Find out which whole numbers are assigned to attributes of modules: those that are not marked any more."""
    numbers = [(m, key, value) for m in modules for key, value in _attributes_of(m).items() if type(value) is int]
    for module, key, value in numbers:
        vars(module)[key] = _Marked(value)
    found: dict[int, list[str]] = {}
    try:
        yield found
    finally:
        for module, key, value in numbers:
            if type(vars(module).get(key)) is _Marked:
                vars(module)[key] = value
            else:
                found.setdefault(id(module), []).append(key)


class _State:
    """Buffers and plain attributes of a module at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {key: tensor.detach().clone() for key, tensor in _tensors_of(module).items()}
        self._attributes = _attributes_of(module)
        self._contents = {key: value.copy() for key, value in _containers_of(module).items()}

    def changes(self, module: nn.Module) -> list[str]:
        """Names of tensors that have other values by now, of numbers that were assigned anew, and of what grew."""
        now, buffers = _attributes_of(module), dict(module.named_buffers(recurse=False))
        numbers = [key for key, value in now.items() if type(value) in _NUMBERS and not self._has(key, value)]
        written = [
            key
            for key, tensor in _tensors_of(module).items()
            if (key in buffers or self._attributes.get(key) is tensor) and not same(self._tensors.get(key), tensor)
        ]
        containers = _containers_of(module).items()
        grown = [key for key, value in containers if value is self._attributes.get(key) and self._counts(key, value)]
        return written + numbers + grown

    def _counts(self, key: str, value: Any) -> bool:
        """Whether a list or a dictionary has more entries by now, or other numbers."""
        before = self._contents[key]
        if len(value) > len(before):
            return True
        pairs = zip(_values(value), _values(before))
        return any(type(now) in _NUMBERS and now != then for now, then in pairs)

    def new_tensors(self, module: nn.Module) -> list[str]:
        """Names of attributes that hold other tensors by now, which may be NaN."""
        return [
            key
            for key, value in _attributes_of(module).items()
            if isinstance(value, Tensor) and value.is_floating_point() and self._attributes.get(key) is not value
        ]

    def _has(self, key: str, value: Any) -> bool:
        before = self._attributes.get(key)
        # A float that was computed again is another object, though it may have the same value.
        return before is value or (type(value) is not float and type(before) is type(value) and before == value)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors in plain attributes."""
    plain = {key: value for key, value in _attributes_of(module).items() if isinstance(value, Tensor)}
    return dict(module.named_buffers(recurse=False)) | plain


def _containers_of(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in _attributes_of(module).items() if type(value) in (list, dict)}


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _fill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content) if isinstance(container, dict) else container.extend(content)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(called_by_steps(module)).items() if key not in _INTERNAL}
