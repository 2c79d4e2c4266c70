"""The documents: links lead to files and headings that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import lightning_asyncpp
import lightning_asyncpp.fabric

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

PUBLIC = [
    value
    for package in (lightning_asyncpp, lightning_asyncpp.fabric)
    for name, value in vars(package).items()
    if inspect.isclass(value) and not name.startswith("_")
]


def anchor(heading: str) -> str:
    """What a heading is called in a link, by the rule of GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    return {anchor(line) for line in text.splitlines() if line.startswith("#")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_argument_of_a_public_class_is_explained(cls: type) -> None:
    """By the class or one it is derived from, as ``asyncpp fit --help`` reads it."""
    documents = "\n".join(c.__doc__ or "" for c in cls.__mro__ if c.__module__.startswith("lightning_asyncpp"))
    explained = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^ +(\w+(?:, \w+)*):", documents))))
    parameters = inspect.signature(cls.__init__).parameters
    named = {n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {"self"}
    assert not named - explained
