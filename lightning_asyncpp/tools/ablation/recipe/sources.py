"""What of the user's own code decides the result of a training: a run made with other code is another run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import pkgutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[3]


def own_sources(config: Any) -> dict[str, str]:
    """Digests of the files of the classes that a recipe names, but for installed packages, this one among them.

    These are the file that the class's path names, the one that defines the class, if it is another, and those of its
    base classes. What else those files import is not looked at.

    Args:
        config: a recipe of ``asyncpp fit``, or a part of it.

    Returns:
        Path of a class -> digest of its file.
    """
    found: dict[str, str] = {}
    for class_path in sorted(set(_class_paths(config))):
        found |= _digests(class_path)
    return found


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        class_path = config.get("class_path")
        if isinstance(class_path, str) and "." in class_path:
            yield class_path
    parts = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
    for part in parts:
        yield from _class_paths(part)


@functools.cache  # code that changes while a grid is run does not split it
def _digests(class_path: str) -> dict[str, str]:
    files: dict[Path, str] = {}
    for name, file in _files(class_path):
        files.setdefault(file.resolve(), name)
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for file, name in files.items() if _is_own(file)}


def _files(class_path: str) -> Iterator[tuple[str, Path]]:
    """The files of a class, the one that its path names first; all of them are imported then."""
    try:
        spec = importlib.util.find_spec(class_path.rpartition(".")[0])
    except (ImportError, AttributeError, ValueError):  # the check of the recipe tells
        return
    if spec is None or spec.origin is None or not _is_own(Path(spec.origin).resolve()):
        return
    try:
        found = pkgutil.resolve_name(class_path)
    except Exception:  # the user's code, which the check of the recipe imports, too
        found = None
    yield class_path, Path(spec.origin)
    for part in getattr(found, "__mro__", (found,)):
        with contextlib.suppress(TypeError, OSError):  # not written in Python
            if file := inspect.getsourcefile(part):
                yield f"{part.__module__}.{part.__qualname__}", Path(file)


def _is_own(file: Path) -> bool:
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    if {"site-packages", "dist-packages"} & set(file.parts):
        return False
    return file.is_file() and not any(file.is_relative_to(folder) for folder in (*installed, _PACKAGE))
