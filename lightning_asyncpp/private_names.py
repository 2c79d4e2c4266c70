"""Private names of torch, torchmetrics and Lightning: where one is needed, its absence is an error that says so.

One that is still there may mean something else in another release: who uses one that was not tested is told.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from typing import Any

Release = tuple[int, int]
TESTED: Mapping[str, tuple[Release, Release]] = {
    "lightning": ((2, 6), (2, 6)),
    "torch": ((2, 11), (2, 15)),
    "torchmetrics": ((1, 5), (1, 9)),
}
"""Package -> the oldest and the newest release, (major, minor), that the whole suite was run with.

After a run with another one, on CPUs and on a GPU, this is the only place to change; the floors in pyproject.toml are
the oldest.
"""
WARNED_OF = ("lightning", "torch")


def _words(oldest: Release, newest: Release) -> str:
    return " to ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in (oldest, newest)))


TESTED_WITH = {package: _words(*releases) for package, releases in TESTED.items()}


class UntestedVersionWarning(UserWarning):
    """A version of Lightning or torch is installed that this release was not tested with."""


def untested_versions(installed: Mapping[str, str] | None = None) -> str:
    """What to tell the user of packages outside the tested releases; nothing if there are none.

    Args:
        installed: package -> version; default: what is installed.
    """
    versions = installed_versions(WARNED_OF) if installed is None else installed
    found = [_untested(package, text) for package, text in versions.items()]
    if not any(found):
        return ""
    return (
        f"{'; '.join(filter(None, found))}: private names that this package relies on may mean something else there."
        " Install a version that was tested, or compare a short run with one under it. To silence this:"
        f' warnings.filterwarnings("ignore", category={__name__}.{UntestedVersionWarning.__name__})'
    )


@functools.cache
def version(package: str) -> str:
    """Of an installed package, whose whole description is parsed for it: once, not for every strategy."""
    return metadata.version(package)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version; without those that are imported from elsewhere."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _untested(package: str, text: str) -> str:
    """In words, if a version is older or newer; of a local or development version its release counts."""
    oldest, newest = TESTED[package]
    release = re.match(r"\s*v?(?:\d+!)?(\d+)(?:\.(\d+))?", text)
    if release is None:
        return ""
    found = int(release[1]), int(release[2] or 0)
    if oldest <= found <= newest:
        return ""
    how, than = ("newer", newest) if found > newest else ("older", oldest)
    return f"{package} {text} is {how} than {than[0]}.{than[1]}.x, which this release was tested with"


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
