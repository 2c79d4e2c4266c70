"""Packages that come with an extra of this one: imported where they are needed, or an error that says how to get them.

Nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

EXTRAS = {
    "peft": "lora",
    "pyarrow": "prepare",
    "transformers": "hf",
}
"""Package -> the extra of this one that brings it; others are installed by their own names."""


def optional_package(name: str, user: str) -> Any:
    """Import a package, or one of its modules.

    Args:
        name: such as ``"transformers"``, or ``"safetensors.torch"``.
        user: what cannot be done without it.

    Returns:
        The module.

    Raises:
        ImportError: it is not installed, with what to install; or it is, and cannot be imported itself.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise  # the package is there, and something that it needs is not
        raise ImportError(needed(user, [package]), name=package) from error


def needed(user: str, packages: Iterable[str], extra: str | None = None) -> str:
    """What to say where packages are missing.

    Args:
        user: what needs them.
        packages: at least one.
        extra: that brings all of them; default: the extra of each, or the package by its own name.
    """
    packages = list(packages)
    names = " and ".join(f"`{package}`" for package in packages)
    extras = {extra} if extra is not None else {EXTRAS[package] for package in packages if package in EXTRAS}
    own = [package for package in packages if extra is None and package not in EXTRAS]
    wanted = [f'"lightning-asyncpp[{",".join(sorted(extras))}]"'] if extras else []
    return f"{user} needs {names}, not installed here: pip install {' '.join([*wanted, *own])}"
