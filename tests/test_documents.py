"""The documents: links lead to files and headings that exist, and so do the names that they give of the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import lightning_asyncpp
import lightning_asyncpp.fabric

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_asyncpp"
INTERNALS = ROOT / "docs" / "project" / "internals.md"
PAGES = [page for folder in ("docs", "research") for page in sorted((ROOT / folder).rglob("*.md"))]
PAGES += sorted(ROOT.glob("*.md"))

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


def names_in(code: ast.AST, before: str = "") -> set[str]:
    """Classes and functions of a file; methods with their class's name in front."""
    names = set()
    for node in ast.iter_child_nodes(code):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names |= {before + node.name} | names_in(node, f"{before}{node.name}.")
    return names


def unknown_names(text: str) -> list[str]:
    """Which of the files, folders, ``file.py:name``, and ``Class.method`` in backticks are not in the package."""
    unknown, known = [], set()
    for path, name in re.findall(r"`([\w./-]+(?:\.(?:py|md)|/))(?::([\w.]+))?`", text):
        file = next((folder / path for folder in (PACKAGE, ROOT) if (folder / path).exists()), None)
        names = names_in(ast.parse(file.read_text(encoding="utf-8"))) if file and file.suffix == ".py" else set()
        known |= names
        if file is None or (name and name not in names):
            unknown.append(f"{path}:{name}")
    return unknown + [name for name in re.findall(r"`([A-Z]\w+\.\w+)`", text) if name not in known]


def test_what_internals_names_exists() -> None:
    assert not unknown_names(INTERNALS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    ["`core/gone.py`", "`gone/`", "`core/stage_optimizer.py:Gone`",
     "`core/stage_optimizer.py:StageOptimizer.gone`", "`core/stage_optimizer.py` and `StageOptimizer.gone`"],
)  # fmt: skip
def test_what_is_gone_is_noticed(text: str) -> None:
    assert unknown_names(text)
    assert not unknown_names(
        "`core/stage_optimizer.py:StageOptimizer.step`, `StageOptimizer.release`, `tests/helpers/workers.py`"
    )


def test_the_files_in_the_diagram_of_internals_exist() -> None:
    text = INTERNALS.read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("    |"))
    folders = [PACKAGE, PACKAGE / "core", PACKAGE / "models", PACKAGE / "trainer"]
    named = set(re.findall(r"[\w]+\.py|[\w]+/", rows))
    assert len(named) > 20
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_argument_of_a_public_class_is_explained(cls: type) -> None:
    """By the class, its constructor, or a class that it is derived from, as ``asyncpp fit --help`` reads it."""
    classes = [c for c in cls.__mro__ if c.__module__.startswith("lightning_asyncpp")]
    documents = "\n".join([*(c.__doc__ or "" for c in classes), cls.__init__.__doc__ or ""])
    explained = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^ +(\w+(?:, \w+)*):", documents))))
    parameters = inspect.signature(cls.__init__).parameters
    named = {n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {"self"}
    assert not named - explained
