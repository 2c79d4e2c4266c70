"""What stands in a module's place while a model's own forward runs without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.unknown import Unknown
from lightning_asyncpp.core.cut.module_as_network import called_by_steps

Answer = Callable[[tuple, dict[str, Any]], Any]


_INTERNAL = frozenset(vars(nn.Module()))
_OF_PLACEHOLDERS = ("name", "stage", "num_stages", "home", "whole")
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Shell(nn.Module):
    """Looks like a module from outside, holds no weights, and returns what it is told.

    ``isinstance`` takes it for one of the module's class. It has the module's plain attributes and its configuration,
    shells of its children, and for its parameters tensors of their shapes that hold nothing but NaN: forwards read
    such attributes of layers that they go on to call. Hooks may set attributes and modes while a model is trained:
    they are asked of what is there in its place.

    Args:
        module: what it looks like.
        name: of it in the model.
        unknown: makes its tensors.
    """

    def __init__(self, module: nn.Module, name: str, unknown: Unknown) -> None:
        super().__init__()
        self.stands_for, self.unknown, self.kind = name, unknown, type(module)
        self.answer: Answer | None = None
        self.hides: nn.Module | None
        self.hide(None)
        del self.training  # asked of the model, which may be in another mode by then
        self.look_at(module)
        for key, child in module.named_children():
            self.add_module(key, Shell(child, f"{name}.{key}", unknown))

    def hide(self, module: nn.Module | None) -> None:
        """Stand in the place of a module for a while, or no longer.

        Args:
            module: it, or what a stage has in its place.
        """
        vars(self)["hides"] = module  # no submodule
        for key, shell in self.named_children():
            if isinstance(shell, Shell):
                shell.hide(None if module is None else vars(module)["_modules"].get(key))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What ``isinstance`` goes by, beside the type."""
        return vars(self).get("kind", Shell)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (), dict(vars(self))

    def look_at(self, module: nn.Module) -> None:
        """Take over what a module says of itself, and its children of themselves.

        Args:
            module: that it stands for, whole; it may have been converted to another dtype.
        """
        own = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
        own = {key: value for key, value in own.items() if f"{self.stands_for}.{key}" not in self.unknown.changed}
        self.facts = {key: value for key, value in own.items() if key == "config" or _is_plain(value)}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        self.tensors = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors}
        for key, shell in self.named_children():
            if isinstance(shell, Shell) and (child := getattr(module, key, None)) is not None:
                shell.look_at(child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what it is told."""
        if self.answer is None:
            raise RuntimeError(f"{self.stands_for} is called by itself, apart from the module around it")
        return self.answer(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        now = {} if own.get("hides") is None else vars(own["hides"])
        if name == "training":
            return now.get(name, own["unknown"].training)
        if name in own.get("facts", ()):
            given = own["facts"][name]
            return now.get(name, given) if _is_plain(given) and not _is_of_placeholder(now, name) else given
        if name in own.get("tensors", ()):
            shape, dtype = own["tensors"][name]
            return own["unknown"].nothing(f"{own['stands_for']}.{name}", shape, dtype)
        try:
            return super().__getattr__(name)
        except AttributeError:
            where = own.get("stands_for", "")
            raise AttributeError(
                f"{where}.{name} is read by code outside of {where}, which may be on another pipeline stage"
            ) from None


def _empty() -> Shell:
    return Shell.__new__(Shell)


@contextmanager
def in_place_of(model: nn.Module, modules: Mapping[str, nn.Module], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have other modules and tensors in a model for a while.

    Args:
        model: the model.
        modules: name of a submodule -> what stands in its place.
        values: name of a parameter -> what is found under it.
    """
    parents = _parents(model, (*modules, *values))
    before = {name: getattr(*parents[name]) for name in modules}
    hidden: dict[str, Any] = {name: vars(parents[name][0]).get(parents[name][1]) for name in values}
    try:
        for name, module in modules.items():
            setattr(*parents[name], module)
        for name, value in values.items():
            parent, key = parents[name]
            vars(parent)[key] = value  # found before what the module holds as a parameter
        yield
    finally:
        for name, module in before.items():
            setattr(*parents[name], module)
        for name, found in hidden.items():
            parent, key = parents[name]
            del vars(parent)[key]
            if found is not None:
                vars(parent)[key] = found


def _is_of_placeholder(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether an attribute is one that tells what a placeholder stands for."""
    return "num_stages" in attributes and name in _OF_PLACEHOLDERS


def _parents(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[nn.Module, str]]:
    """Name -> the module that holds it, and its name there."""
    places = {name: name.rpartition(".")[::2] for name in names}
    holders = {path: called_by_steps(model.get_submodule(path)) for path in {path for path, _ in places.values()}}
    return {name: (holders[path], key) for name, (path, key) in places.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(entry) for entry in value)
    return type(value) in _PLAIN
