"""What stands around the package: workflows run the commands that the documents name, and all say the same version."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_asyncpp import __version__

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
TOOLS = {"pip", "python", "pytest", "ruff", "mypy", "lint-imports", "twine", "mkdocs", "test"}
# Where actions run code of others with this repository's rights.
ACTIONS = {
    "actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact",
    "actions/upload-pages-artifact", "actions/deploy-pages", "pypa/gh-action-pypi-publish",
}  # fmt: skip


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(name: str) -> dict[str, Any]:
    content: dict[str, Any] = loaded(GITHUB / "workflows" / f"{name}.yml")["jobs"]
    return content


def commands(job: dict[str, Any]) -> list[str]:
    """What the steps of a job run, in their order."""
    return [step["run"] for step in job["steps"] if "run" in step]


def told(file: str, pattern: str) -> list[str]:
    """The commands, joined by &&, of the first line of a document that matches."""
    match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"))
    assert match, f"{file} does not say {pattern}"
    return [command.strip() for command in match.group().split("&&")]


@pytest.mark.parametrize("job", ["tests", "floors"])
def test_ci_runs_the_test_command_of_the_readme(job: str) -> None:
    install, test = told("README.md", r'pip install -e "\.\[test\]" && pytest.*')
    floors = " -c tests/floors.txt" if job == "floors" else ""
    assert commands(jobs("ci")[job]) == [install + floors, test]
    assert f"{install}{floors}" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_ci_lints_as_contributors_are_asked_to() -> None:
    linters = told("CONTRIBUTING.md", "ruff check.*lint-imports")
    assert commands(jobs("ci")["lint"])[1:] == linters
    assert [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line in linters] == linters


def test_commits_are_linted_by_the_same_tools() -> None:
    hooks = [hook for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = [hook["entry"] for hook in hooks]
    linters = [linter.removesuffix(" .").removesuffix(" --check") for linter in commands(jobs("ci")["lint"])[1:]]
    assert entries == linters


@pytest.mark.parametrize("workflow", sorted(GITHUB.glob("workflows/*.yml")), ids=lambda path: path.stem)
def test_workflows_run_what_there_is(workflow: Path) -> None:
    content = loaded(workflow)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"], name
        for command in commands(job):
            assert command.split()[0] in TOOLS, command
            for path in re.findall(r"\btests/[\w./-]+", command):
                assert (ROOT / path).exists(), command
        for action in filter(None, (step.get("uses") for step in job["steps"])):
            assert action.partition("@")[0] in ACTIONS, action


def test_a_release_is_checked_before_it_is_trusted() -> None:
    build, publish = jobs("release")["build"], jobs("release")["publish"]
    assert commands(build)[:3] == commands(jobs("ci")["package"])[:3]
    assert commands(build)[2] == "twine check --strict dist/*"
    assert "permissions" not in build
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})
    assert commands(publish) == []


def test_the_version_is_the_same_everywhere() -> None:
    assert loaded(ROOT / "CITATION.cff")["version"] == __version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, *released = re.findall(r"(?m)^## \[([^\]]+)\](.*)", changelog)
    assert unreleased == ("Unreleased", "")
    assert released[0][0] == __version__
    for (version, date), (before, _) in itertools.pairwise([*released, ("0", "")]):
        assert re.fullmatch(r" - \d{4}-\d\d-\d\d", date), version
        assert version > before


@pytest.mark.parametrize("form", sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_issue_forms_ask_for_what_the_command_prints(form: Path) -> None:
    content = loaded(form)
    assert {"name", "description", "body"} <= content.keys()
    identities = [part["id"] for part in content["body"]]
    assert len(set(identities)) == len(identities)
    (versions,) = [part for part in content["body"] if part["id"] == "versions"]
    assert "`asyncpp --version`" in versions["attributes"]["description"]
