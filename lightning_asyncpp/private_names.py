"""Private names of torch, torchmetrics and Lightning: where one is needed, its absence is an error that says so."""

from __future__ import annotations

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
