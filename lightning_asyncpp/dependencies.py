"""Private names of other packages, and the packages of the extras; if one is missing, the error names it.

Nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED_WITH = {"lightning": "2.6", "torch": "2.11 to 2.15", "torchmetrics": "1.5 to 1.9"}
"""Package -> the releases that the whole suite was run with."""


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version; without those that are imported from elsewhere."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


class PrivateNameError(RuntimeError):
    """A private name that this package relies on is gone.

    Args:
        package: that had it.
        name: with its owner.
        purpose: what it is needed for.
    """

    def __init__(self, package: str, name: str, purpose: str) -> None:
        super().__init__(
            f"{package} {version(package)} has no {name}, which lightning_asyncpp needs to {purpose}; install a"
            f" version that it was tested with ({TESTED_WITH[package]})"
        )


def required(owner: Any, name: str, purpose: str) -> Any:
    """Return the attribute ``name`` of a module, a class or an object of torch, torchmetrics or Lightning.

    Raises:
        PrivateNameError: there is none.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        source = getattr(owner, "__module__", None) or where  # a module has a name alone
        top = source.partition(".")[0]
        package = top if top in TESTED_WITH else "lightning"
        raise PrivateNameError(package, f"{where}.{name}", purpose)
    return getattr(owner, name)


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
    """Return the message for missing packages.

    Args:
        user: the part of this package that needs them.
        packages: their names, at least one.
        extra: the extra that installs all of them; default: the extra of each, or the package by its own name.
    """
    packages = list(packages)
    names = " and ".join(f"`{package}`" for package in packages)
    extras = {extra} if extra is not None else {EXTRAS[package] for package in packages if package in EXTRAS}
    own = [package for package in packages if extra is None and package not in EXTRAS]
    wanted = [f'"lightning-asyncpp[{",".join(sorted(extras))}]"'] if extras else []
    return f"{user} needs {names}, not installed here: pip install {' '.join([*wanted, *own])}"
