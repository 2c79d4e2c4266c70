"""Links, names, quoted messages, versions and commands in the documents are correct.

The site builds from ``docs/`` without a warning, and CI runs what the documents tell contributors to run.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lightning_asyncpp
import lightning_asyncpp.fabric
from docs.site_hooks import REPOSITORY
from tests.helpers import programs as forked

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_asyncpp"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = [*(page for folder in ("docs", "research") for page in sorted((ROOT / folder).rglob("*.md")))]
PAGES += sorted(ROOT.glob("*.md"))
PUBLIC = [
    value
    for package in (lightning_asyncpp, lightning_asyncpp.fabric)
    for name, value in vars(package).items()
    if inspect.isclass(value) and not name.startswith("_")
]
TOOLS = {"pip", "python", "pytest", "ruff", "mypy", "lint-imports", "twine", "mkdocs", "test"}
# Allowed actions: each runs third-party code with this repository's permissions.
ACTIONS = {
    "actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact",
    "actions/upload-pages-artifact", "actions/deploy-pages", "pypa/gh-action-pypi-publish",
}  # fmt: skip
# Packages without a pinned oldest version: development tools, and an SDK whose service only new versions reach.
NO_FLOOR = {
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "import-linter", "mkdocs-material",
    "mkdocstrings", "hatchling", "nbclient", "ipykernel", "lightning-sdk",
}  # fmt: skip


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the link anchors of a page's headings, by GitHub's rule."""
    lines = re.sub(r"(?ms)^```.*?^```", "", read(page)).splitlines()
    headings = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Linked files and headings exist, also behind this repository's URL, and so do the tests that a page names."""
    text = re.sub(rf"{REPOSITORY}/(?:blob|tree)/main/", f"{ROOT}/", read(page))
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    targets = [(page.parent / path if path else page, heading) for path, _, heading in links]
    assert not [
        (path, heading) for path, heading in targets
        if not path.exists() or (heading and heading not in anchors(path))
    ]  # fmt: skip
    tests = re.findall(r"\b(?:research/theory/)?tests/[\w/]+(?:\.\w+)?", text)
    assert not [path for path in tests if not (ROOT / path).exists()]
    # Pages link to each other by relative links; a link to the repository would lead away from the site.
    assert page.parent == ROOT or not re.search(rf"{ROOT}/docs/\S+\.md", text)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every page is in a menu, and links on the built site lead somewhere, too."""
    pytest.importorskip("mkdocs")
    build = ["-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = forked.run([*build, "--site-dir", f"{tmp_path}/site"], tmp_path, seconds=280, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert (tmp_path / "site" / "start" / "quickstart" / "index.html").exists()


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_argument_of_a_public_class_is_explained(cls: type) -> None:
    """Docstrings of the class, its constructor or a base class explain each argument, for ``asyncpp fit --help``."""
    classes = [c for c in cls.__mro__ if c.__module__.startswith("lightning_asyncpp")]
    documents = "\n".join([*(c.__doc__ or "" for c in classes), cls.__init__.__doc__ or ""])
    explained = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^ +(\w+(?:, \w+)*):", documents))))
    parameters = inspect.signature(cls.__init__).parameters
    named = {n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {"self"}
    assert not named - explained


def strings_of(path: Path) -> Iterator[str]:
    """Yield the strings in a file; f-strings without the values that are filled in."""
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.JoinedStr):
            yield "\0".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_that_troubleshooting_quotes_exist() -> None:
    """Code in the first column of tables with the header ``message`` occurs in strings of the package."""
    page = read("docs/guides/troubleshooting.md")
    tables = re.findall(r"(?m)^\| message \|.*\n\|.*\n((?:\|.*\n)+)", page)
    rows = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    quoted = [message for row in rows for message in re.findall(r"`(.+?)`", row)]
    printed = "\n".join(text for path in PACKAGE.rglob("*.py") for text in strings_of(path))
    parts = [part.strip(" :") for message in quoted for part in re.split(r"\.\.\.|\[\.\.\.\]", message)]
    assert len(quoted) >= 3
    assert not [part for part in parts if part.strip("=[]") and part not in printed]


def test_the_oldest_versions_that_are_promised_are_those_that_the_suite_is_run_with() -> None:
    floors: dict[str, set[Version]] = {}
    for text in requires("lightning-asyncpp") or ():
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", text
        floors.setdefault(canonicalize_name(requirement.name), set()).add(Version(specifier.version))
    pins = re.findall(r"(?m)^(\w+)==(\S+)$", read("tests/floors.txt"))
    pinned = {canonicalize_name(name): Version(version) for name, version in pins}
    assert floors.keys() - NO_FLOOR == pinned.keys()
    for name, version in pinned.items():
        (floor,) = floors[name]
        # A floor of 2.11 means 2.11.0, and a floor of 6 the first 6.x that can still be installed.
        assert version >= floor, name
        assert version.release[: len(floor.release)] == floor.release, name


def jobs(workflow: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(read(f".github/workflows/{workflow}.yml"))
    assert content["permissions"] == {"contents": "read"}
    return dict(content["jobs"])


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", [path.stem for path in WORKFLOWS])
def test_workflows_run_what_there_is(workflow: str) -> None:
    for name, job in jobs(workflow).items():
        assert job["timeout-minutes"], name
        for command in commands(job):
            assert command.split()[0] in TOOLS, command
            assert all((ROOT / path).exists() for path in re.findall(r"\btests/[\w./-]+", command)), command
        for action in filter(None, (step.get("uses") for step in job["steps"])):
            assert action.partition("@")[0] in ACTIONS, action


def test_ci_tests_and_lints_as_the_documents_tell_contributors() -> None:
    (command,) = re.findall(r'pip install -e "\.\[test\]" && pytest.*', read("README.md"))
    install, test = command.split(" && ")
    floors = f"{install} -c tests/floors.txt"
    assert floors in read("CONTRIBUTING.md")
    assert commands(jobs("ci")["tests"]) == [install, test]
    assert commands(jobs("ci")["floors"]) == [floors, test]
    (linters,) = re.findall("ruff check.*lint-imports", read("CONTRIBUTING.md"))
    assert commands(jobs("ci")["lint"])[1:] == linters.split(" && ")


def test_the_version_is_the_same_everywhere() -> None:
    version = lightning_asyncpp.__version__
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    unreleased, *released = re.findall(r"(?m)^## \[([^\]]+)\](.*)", read("CHANGELOG.md"))
    assert unreleased == ("Unreleased", "")
    assert released[0][0] == version
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in released)
    assert all(after > before for (after, _), (before, _) in itertools.pairwise(released))
