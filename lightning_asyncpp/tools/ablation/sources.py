"""What of the user's own code decides the result of a training: a run made with other code is another run."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[2]


def own_sources(config: Any) -> dict[str, str]:
    """Digests of the files of the classes that a recipe names, but for installed packages, this one among them.

    What those files import is not looked at.

    Args:
        config: a recipe of ``asyncpp fit``, or a part of it.

    Returns:
        Class path -> digest of its file.
    """
    found = {class_path: _digest(class_path) for class_path in sorted(set(_class_paths(config)))}
    return {class_path: digest for class_path, digest in found.items() if digest}


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        class_path = config.get("class_path")
        if isinstance(class_path, str) and "." in class_path:
            yield class_path
    parts = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
    for part in parts:
        yield from _class_paths(part)


@functools.cache  # code that changes while a grid is run does not split it
def _digest(class_path: str) -> str:
    try:
        spec = importlib.util.find_spec(class_path.rpartition(".")[0])
    except (ImportError, AttributeError, ValueError):  # the check of the recipe tells
        return ""
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    file = Path(spec.origin).resolve()
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    if any(file.is_relative_to(folder) for folder in (*installed, _PACKAGE)):
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()
