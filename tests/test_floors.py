"""The oldest versions that are promised are those that the suite is run with: tests/floors.txt."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PINNED = dict(re.findall(r"^(\w+)==(\S+)$", Path(__file__).with_name("floors.txt").read_text(), re.MULTILINE))
# Tools of who works on this package, and an interface to a service that only its newest versions reach.
UNBOUND = {
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "import-linter", "mkdocs-material",
    "mkdocstrings", "hatchling", "nbclient", "ipykernel", "lightning-sdk",
}  # fmt: skip


def test_floors_are_those_of_the_package() -> None:
    floors: dict[str, set[Version]] = {}
    for text in requires("lightning-asyncpp") or ():
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", text
        floors.setdefault(canonicalize_name(requirement.name), set()).add(Version(specifier.version))
    pinned = {canonicalize_name(name): Version(version) for name, version in PINNED.items()}
    assert floors.keys() - UNBOUND == pinned.keys()
    for name, version in pinned.items():
        (floor,) = floors[name]
        # 2.11 stands for 2.11.0, and 6 for the first of 6 that can still be installed.
        assert version >= floor, name
        assert version.release[: len(floor.release)] == floor.release, name
