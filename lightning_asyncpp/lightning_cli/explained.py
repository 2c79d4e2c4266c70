"""What jsonargparse complains of, in a line: which name does not exist, and which one may have been meant.

It says all that it tried, and what it knows of where it was: these are read from its message. One that is not
understood is printed as it is.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from lightning_asyncpp.lightning_cli.arguments import STRATEGIES
from lightning_asyncpp.lightning_cli.mistakes import Mistake
from lightning_asyncpp.lightning_cli.nearest import advice, nearest
from lightning_asyncpp.lightning_cli.wrong_values import wrong_value

_KEY = re.compile(r'Parser key "([\w.+]+)"')
_GOT_CLASS = re.compile(r"Got value: Namespace\(.*?class_path='([\w.]+)'")
_GIVEN_CLASS = re.compile(r"given class_path '([\w.]+)'|class_path='([\w.]+)'")
_OPTION = re.compile(r"(?:Option '([\w.]+)' is not accepted|does not accept option '([\w.]+)')")
_GROUP = re.compile(r"Group '([\w.]+)' does not accept")
_ARGUMENTS = re.compile(r"unrecognized arguments: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)|has no attribute '(\w+)'|No module named '([\w.]+)'")
_PATH = re.compile(r"given class_path '([\w.]+)'|Given value: ([\w.]+)$", re.MULTILINE)
_REQUIRED = re.compile(r"the following arguments are required: (.*)$", re.MULTILINE)
_TYPE = re.compile(r"[a-z]\w*(?:\.\w+)*\.[A-Z]\w*")
_WRITTEN = ("optimizer", "config", "print_config", "help", "trace", "trace.mini_batches")  # shorthands of the command
_STRATEGY, _OPTIMIZER = "trainer.strategy", "optimizer"
_SECTIONS = {
    _STRATEGY: "lightning_asyncpp.AsyncPipelineStrategy",
    "model": "lightning_asyncpp.GPTModule",
    "data": "lightning_asyncpp.data.TextDataModule",
}
"""Where a name without a section may belong, with the class that most recipes have there."""


def explained(message: str, known: Iterable[str], name: str = "asyncpp") -> list[Mistake]:
    """What a message says, each in a line or two, where it is about names that do not exist, a wrong value or a missing
    section; else the message.

    Args:
        message: jsonargparse's.
        known: the keys of the parser, and options of the tool that it reads the rest for.
        name: of the command, as it is called.
    """
    key = ".".join(_KEY.findall(message))
    given = _classes_around(message.partition("Given value")[0])
    place = min(max(len(_KEY.findall(message)) - 1, 0), len(given) - 1)
    class_path = given[place] if given else ""  # of several types that were tried for one key, the first is what it is
    if found := list(_ARGUMENTS.finditer(message)):
        if _class_of(message, found[-1]) == class_path:
            return list(_unknown_arguments(found[-1].group(1), key, class_path, known, name))
    elif found := list(_OPTION.finditer(message)):
        if _class_of(message, found[0]) == class_path:
            group, option = _GROUP.findall(message), next(part for part in found[0].groups() if part)
            option = f"{group[-1]}.{option}" if group else option
            if class_path:
                return [_unknown_argument(option, key, class_path)]
            near = _elsewhere(option) or advice(option, known)
            return [Mistake(f"there is no option {option!r}{near}", option)]
    elif required := _REQUIRED.search(message):
        return [Mistake(missing(required.group(1).split(", ")))]
    elif said := _unknown_class(message, key):
        return [said]
    return [wrong_value(message) or Mistake(message)]


def missing(keys: Iterable[str]) -> str:
    """What to say where recipes and options leave out whole sections."""
    sections = " and ".join(f"`{key.rpartition('.')[2]}:`" for key in sorted(keys, reverse=True))
    return f"no recipe and no option says {sections}; `asyncpp recipes` lists recipes that have all that is needed"


def _classes_around(message: str) -> list[str]:
    """The classes whose arguments a complaint is about, the outermost first."""
    classes: list[str] = []
    for line in message.splitlines():
        inside_out = _GOT_CLASS.findall(line)  # a complaint within one line ends with what it stands in
        classes += reversed(inside_out) if inside_out else [a or b for a, b in _GIVEN_CLASS.findall(line)]
    return classes


def _class_of(message: str, found: re.Match[str]) -> str:
    """The class that a complaint is about: named after it in its line, or else before it; empty if none is."""
    rest = _GIVEN_CLASS.search(message[found.start() :].partition("\n")[0])
    before = list(_GIVEN_CLASS.finditer(message, 0, found.start()))
    match = rest or (before[-1] if before else None)
    return "" if match is None else match.group(1) or match.group(2)


def _unknown_arguments(text: str, key: str, class_path: str, known: Iterable[str], name: str) -> Iterator[Mistake]:
    known = list(known)
    words = text.split()
    options = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    for option in options:
        if class_path:
            yield _unknown_argument(option, key, class_path)
        else:
            near = _elsewhere(option, "--") or advice(option, [*known, *_WRITTEN, *_of_sections(option)], "--")
            yield Mistake(f"there is no option --{option}{near}", option)
    if not options:
        where = f"a recipe stands right after the subcommand: `{name} {words[0]} ...`"
        yield Mistake(f"unrecognized arguments: {text}; {where}")


def _unknown_argument(option: str, key: str, class_path: str) -> Mistake:
    where = f"--{key}: " if key else ""
    own, full = arguments_of(class_path), f"{key}.{option}"
    near = advice(option, own) if nearest(option, own) else _elsewhere(full, "--") or advice(option, own)
    return Mistake(f"{where}{class_path} has no argument {option!r}{near}", full.lstrip("."))


def _unknown_class(message: str, key: str) -> Mistake | None:
    """What is wrong with the name of a class; None if nothing."""
    if not (found := list(_NO_CLASS.finditer(message))):
        return None
    name, attribute, module = found[-1].groups()
    paths = [match.group(1) or match.group(2) for match in _PATH.finditer(message)]
    if attribute and not any(path.endswith(f".{attribute}") for path in paths):
        return None  # of the user's own code, as it was imported
    if module and not any(path.startswith(f"{module}.") for path in paths):
        return None
    if module:
        said = f"--{key}: there is no module {module!r} to be imported; it is looked for in this folder, too"
        return Mistake(said, key, paths[-1].rpartition(".")[2])
    name = name or attribute
    subtypes = message[: found[-1].start()].rpartition("Subtypes:")[2].partition("\n")[0]
    bases = [cls for path in _TYPE.findall(subtypes) if isinstance(cls := _found(path), type)]
    bases = [cls for cls in bases if not cls.__module__.startswith(("collections", "typing"))]
    if bases == [torch.Tensor]:
        return None  # of a number that may be a tensor; nobody names a class of tensors in a recipe
    return Mistake(f"--{key}: {_no_class(name, key, bases, paths)}", key, name.rpartition(".")[2])


def _no_class(name: str, key: str, bases: Sequence[type], paths: Sequence[str]) -> str:
    """What to say of a class that is not where it is looked for.

    Args:
        name: of it.
        key: where it stands.
        bases: what it would have to come from.
        paths: that were given.
    """
    classes = [cls for base in bases for cls in _subclasses(base) if not cls.__name__.startswith("_")]
    known = {cls.__name__ for cls in classes}
    if key == _STRATEGY:
        known |= set(STRATEGIES)
    kinds = " or ".join(dict.fromkeys(cls.__name__ for cls in bases))
    if name in known:  # it is somewhere else
        where = " or ".join(sorted({_public_path(cls) for cls in classes if cls.__name__ == name}))
        given = next((path for path in paths if path.endswith(f".{name}")), name).removesuffix(f".{name}")
        return f"there is no {kinds} {name!r} in {given}; did you mean {where}?"
    return f"there is no {kinds or 'class'} {name!r}{advice(name, sorted(known))}"


def _public_path(cls: type) -> str:
    """Where a class is imported from: the outermost package that shows it."""
    parts = cls.__module__.split(".")
    packages = [".".join(parts[: n + 1]) for n in range(len(parts))]
    shown = [p for p in packages if getattr(sys.modules.get(p), cls.__name__, None) is cls]
    return f"{shown[0] if shown else cls.__module__}.{cls.__name__}"


def arguments_of(class_path: str) -> list[str]:
    """The arguments of a class, with those of dataclasses among them; none if they cannot be found."""
    cls = _found(class_path)
    if not isinstance(cls, type):
        return []
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(cls, fail_untyped=False)
        return _keys(parser.get_defaults(skip_validation=True))
    except Exception:  # of somebody's class, whose signature is what it is: nothing is suggested
        return []


def _found(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def _keys(defaults: Namespace) -> list[str]:
    return [str(key) for key in defaults.keys(branches=True) if key != "params"]  # an optimizer's are no option


def _elsewhere(option: str, prefix: str = "") -> str:
    """What to say of an option with a section, where another section has one of its name; empty if none has."""
    section, _, name = option.rpartition(".")
    if section == _OPTIMIZER:
        return f"; the optimizer stands below the model: {prefix}model.init_args.{option}"
    found = [f"{place}.{name}" for place, class_path in _SECTIONS.items() if name in arguments_of(class_path)]
    return f"; did you mean {' or '.join(prefix + key for key in found)}?" if found and section else ""


def _of_sections(option: str) -> Iterator[str]:
    """Options with a section, for one that was given without."""
    if "." in option:
        return
    for section, class_path in _SECTIONS.items():
        yield from (f"{section}.{name}" for name in arguments_of(class_path))
    yield from ("optimizer.lr", "optimizer.weight_decay")


def _subclasses(cls: type) -> Iterator[type]:
    below: type
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
