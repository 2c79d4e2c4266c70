"""Access to private names of other packages and to optional packages, with errors that name what is missing.

This module imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED_WITH = {"lightning": "2.6", "torch": "2.11 to 2.15", "torchmetrics": "1.5 to 1.9"}
"""Package -> releases with which the whole test suite was run."""


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return package -> version; packages without installed metadata are left out."""
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
        package: distribution that had the name.
        name: name with its owner, such as ``Trainer._name``.
        purpose: what this package does with the name: ``"run backward passes"``.
    """

    def __init__(self, package: str, name: str, purpose: str) -> None:
        super().__init__(
            f"{package} {version(package)} has no {name}, which lightning_asyncpp needs to {purpose}; install a"
            f" version that lightning_asyncpp was tested with ({TESTED_WITH[package]})"
        )


def required(owner: Any, name: str, purpose: str) -> Any:
    """Return the attribute ``name`` of a module, a class or an object of torch, torchmetrics or Lightning.

    Raises:
        PrivateNameError: the owner has no such attribute.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        source = getattr(owner, "__module__", None) or where  # modules have no __module__
        top = source.partition(".")[0]
        package = top if top in TESTED_WITH else "lightning"
        raise PrivateNameError(package, f"{where}.{name}", purpose)
    return getattr(owner, name)


EXTRAS = {
    "peft": "lora",
    "pyarrow": "prepare",
    "transformers": "hf",
}
"""Package -> extra of lightning-asyncpp that installs it. Packages without an entry are installed by name."""


def optional_package(name: str, user: str) -> Any:
    """Import a package, or one of its modules.

    Args:
        name: name of the module, such as ``"transformers"`` or ``"safetensors.torch"``.
        user: part of this package that needs the module.

    Returns:
        The module.

    Raises:
        ImportError: the package is not installed (the message says what to install), or its import fails.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its dependencies is not
        wanted = f'"lightning-asyncpp[{EXTRAS[package]}]"' if package in EXTRAS else package
        message = f"{user} needs `{package}`, not installed here: pip install {wanted}"
        raise ImportError(message, name=package) from error
