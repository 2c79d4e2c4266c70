"""Which hyper-parameters of a checkpoint become arguments: plain values, and no class that nobody else has named.

A checkpoint is data, and its hyper-parameters are read by what reads recipes, which name classes and functions to
import and to call. So a name counts only where the recipe or the command line has the same one, or where it is that of
an optimizer, a schedule or a layer of torch or of this package. Whether a text is a name, its argument's type says.
"""

from __future__ import annotations

import inspect
import os
import sys
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import local_path

CLASS, ARGUMENTS = "class_path", "init_args"
SAVED_CLASS, INSTANTIATOR = "_class_path", "_instantiator"
"""What LightningCLI saves among the hyper-parameters beside them."""
_SPECIFICATION = frozenset({CLASS, ARGUMENTS, "dict_kwargs"})
_KNOWN = ("torch.optim.", "torch.nn.modules.", "lightning_asyncpp.optim.")
_KNOWN_KINDS = (Optimizer, LRScheduler, nn.Module)
_OPEN = (Any, object, inspect.Parameter.empty)  # anything is taken as it is
_TEXT = (str, bytes, bool, int, float, complex, type(None), *_OPEN)
_TEXT_MODULES = ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "re", "uuid")
_CONTAINERS = (
    list, tuple, set, frozenset, dict, abc.Iterable, abc.Collection, abc.Sequence, abc.MutableSequence, abc.Set,
    abc.Mapping, abc.MutableMapping,
)  # fmt: skip
_NOTHING = object()


class _Unknown:
    """The type of an argument of which nobody knows it: a text may be a name."""


def imported(path: str) -> Any:
    """What has this import path among what is imported already; None if nothing has. Nothing is imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), "__dict__", {}).get(name)


def same_class(path: str | None, other: str | None) -> bool:
    """Whether two import paths are those of one class."""
    if path == other:
        return True
    if not isinstance(path, str) or not isinstance(other, str):
        return False
    found = imported(path)
    return found is not None and found is imported(other)


def never_saved(cls: Any) -> frozenset[str]:
    """The arguments of a class that it saves in no checkpoint, if it says so."""
    return frozenset(getattr(cls, "never_from_a_checkpoint", ()))


def instead_of_saved(cls: type, checkpoint_path: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``load_from_checkpoint`` has to be given beside what it was given, so that a file names nothing to run.

    Args:
        cls: the class that it is a method of.
        checkpoint_path: its argument.
        given: the module's arguments, as keywords.

    Raises:
        StorageError: the file cannot be read.
        ConfigurationError: hyper-parameters in it name something to import; with what to do.
    """
    path = local_path(checkpoint_path) if isinstance(checkpoint_path, (str, os.PathLike)) else None
    if path is None or not path.is_file():  # then without what looks names up, which our classes do not need
        return {INSTANTIATOR: None, **_defaults(cls, never_saved(cls) - given.keys())}
    content = load(path)
    saved = content.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) if isinstance(content, Mapping) else None
    if not isinstance(saved, Mapping):
        return {}
    named = imported(str(saved.get(SAVED_CLASS)))
    target = named if isinstance(named, type) and issubclass(named, cls) else cls
    never = never_saved(target) & saved.keys() - given.keys()
    others = {name: saved[name] for name in saved.keys() - given.keys() - never - {SAVED_CLASS, INSTANTIATOR}}
    if INSTANTIATOR in saved and (problems := list(refusals(target, others, {}))):
        raise ConfigurationError.from_problems(
            [f"{path} has hyper-parameters that are not taken from a file: {'; '.join(problems)}; give them to"
             " load_from_checkpoint if you know them"]
        )  # fmt: skip
    return _defaults(target, never)


def _defaults(cls: type, names: Set[str]) -> dict[str, Any]:
    return {name: parameter.default for name, (parameter, _) in _parameters(cls).items() if name in names}


def refusals(cls: Any, saved: Mapping[str, Any], asked: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Say which arguments are not taken from a checkpoint, a text each.

    Args:
        cls: the class that they are for; None if it is not known.
        saved: the checkpoint's; nothing in it holds itself.
        asked: what recipe, command line and defaults have.
        place: what their names begin with.
    """
    types, takes_others = argument_types(cls), _takes_others(cls)
    for name, value in saved.items():
        where, same = f"{place}{name}", asked.get(name, _NOTHING)
        if problem := _no_plain(value):
            yield f"{where}: {problem}"
        elif name not in types and (not takes_others or not str(name).isidentifier() or name in _SPECIFICATION):
            yield f"{where}: {getattr(cls, '__name__', 'the class')} has no such argument"
        elif value == same:
            continue
        elif name in never_saved(cls):
            yield f"{where}: {cls.__name__} saves none; what the checkpoint has, {value!r}, came otherwise into it"
        else:
            yield from _of_value(value, _alternatives(types.get(name, _Unknown)), same, where)


def argument_types(cls: Any) -> dict[str, Any]:
    """Name -> declared type of the arguments of a class, with those that reach its bases by ``**kwargs``."""
    return {name: _evaluated(parameter.annotation, init) for name, (parameter, init) in _parameters(cls).items()}


def _parameters(cls: Any) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Name -> argument of a class or of a base, and the method that has it."""
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    for init, parameters in _signatures(cls):
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                found.setdefault(parameter.name, (parameter, init))
    return found


def _takes_others(cls: Any) -> bool:
    """Whether a class may take further arguments, by ``**kwargs`` that go nowhere that can be seen."""
    *_, last = [[], *(parameters for _, parameters in _signatures(cls))]
    return not isinstance(cls, type) or any(parameter.kind == parameter.VAR_KEYWORD for parameter in last)


def _signatures(cls: Any) -> Iterator[tuple[Any, list[inspect.Parameter]]]:
    """``__init__`` of a class and its arguments, and while they end in ``**kwargs`` that of the base that follows."""
    for base in cls.__mro__ if isinstance(cls, type) else ():
        if base is object or (init := base.__dict__.get("__init__")) is None:
            continue
        try:
            parameters = list(inspect.signature(init).parameters.values())
        except (TypeError, ValueError):  # of a class that is not written in Python
            continue
        yield init, parameters
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            return


def _evaluated(annotation: Any, init: Any) -> Any:
    """An annotation that may be a text, as with ``from __future__ import annotations``."""

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    try:
        return typing.get_type_hints(holder, getattr(inspect.unwrap(init), "__globals__", {}), include_extras=True)[
            "it"
        ]
    except Exception:  # whatever a name leads to that is there for type checkers alone
        return _Unknown


def _of_value(value: Any, kinds: Sequence[Any], asked: Any, where: str) -> Iterator[str]:
    if value == asked:
        return
    if isinstance(value, str):
        if CLASS in value or not _is_text(kinds) or (_has_escapes(value) and not _stays_text(kinds)):
            yield f"{where}: {_names(value)}"
    elif isinstance(value, (list, tuple)):
        is_alike = isinstance(asked, (list, tuple)) and len(asked) == len(value)
        for index, child in enumerate(value):
            yield from _of_value(child, _inner(kinds), asked[index] if is_alike else _NOTHING, f"{where}[{index}]")
    elif isinstance(value, Mapping):
        before: Mapping[Any, Any] = asked if isinstance(asked, Mapping) else {}
        if CLASS in value:
            yield from _of_class(value, before, where)
            return
        for key, child in value.items():
            if isinstance(key, str) and CLASS in key:
                yield f"{where}: {_names(key)}"
            yield from _of_value(child, _inner(kinds, key), before.get(key, _NOTHING), f"{where}.{key}")


def _of_class(value: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> Iterator[str]:
    """Of a class and its arguments."""
    path, arguments = value[CLASS], value.get(ARGUMENTS) or {}
    is_same = same_class(path, asked.get(CLASS))
    cls = imported(path) if isinstance(path, str) else None
    if not (is_same or _is_known(cls)):
        yield f"{where}: {_names(path)}"
    elif not isinstance(arguments, Mapping) or value.keys() - {CLASS, ARGUMENTS}:
        yield f"{where}: it is no class with its {ARGUMENTS} alone"
    else:
        before = asked.get(ARGUMENTS) if is_same else None
        yield from refusals(cls, arguments, before or {}, f"{where}.{ARGUMENTS}.")


def _is_known(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, _KNOWN_KINDS) and f"{cls.__module__}.".startswith(_KNOWN)


def _names(text: Any) -> str:
    return f"it names {text!r}, which may be something to import or to call, and nobody else names it"


def _no_plain(value: Any) -> str:
    """What is in a value that is no plain one; nothing if all is."""
    if isinstance(value, Mapping):
        return next(filter(None, (_no_plain(child) for pair in value.items() for child in pair)), "")
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_no_plain, value)), "")
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return "" if is_plain else f"it holds a {type(value).__name__}, which is no plain value"


def _alternatives(kind: Any) -> list[Any]:
    """The types of a union; of any other type that one."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [alternative for part in get_args(kind) for alternative in _alternatives(part)]
    return [kind]


def _is_text(kinds: Sequence[Any]) -> bool:
    """Whether a text stays one as a value of one of these types: with none of them anything is looked up."""
    return all(map(_is_text_of, kinds))


def _stays_text(kinds: Sequence[Any]) -> bool:
    """Whether no text is read as YAML for one of these types, which would find containers in it."""
    origins = [get_origin(kind) or kind for kind in kinds]
    return not any(origin is read for origin in origins for read in (*_OPEN, *_CONTAINERS))


def _has_escapes(text: str) -> bool:
    """Whether YAML may read a name in a text that is not in it letter by letter: ``{"class\\x5fpath": ...}``."""
    return all(sign in text for sign in '\\":')


def _is_text_of(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if any(origin is plain for plain in _TEXT) or origin is Literal:
        return True
    if origin in _CONTAINERS:
        return _is_text(_held_by(kind))
    return isinstance(origin, type) and (issubclass(origin, (Enum, os.PathLike)) or origin.__module__ in _TEXT_MODULES)


def _inner(kinds: Sequence[Any], key: Any = None) -> list[Any]:
    """The types of what is in a container of one of these, or under a key of a mapping or of an object with fields."""
    found = []
    for kind in kinds:
        origin = get_origin(kind) or kind
        if any(origin is plain for plain in _OPEN) or origin in _CONTAINERS:
            found += _held_by(kind)
        elif is_dataclass(origin):
            found += _alternatives(argument_types(origin).get(key, _Unknown))
        elif not any(origin is plain for plain in _TEXT):  # those hold nothing
            found.append(_Unknown)
    return found or [_Unknown]


def _held_by(kind: Any) -> list[Any]:
    """The types of what a container holds; of keys, too."""
    arguments = [argument for argument in get_args(kind) if argument is not ...]
    return [alternative for argument in arguments or [Any] for alternative in _alternatives(argument)]
