"""Recipes of the package by their names: in every command that takes one, and what is said of a name that is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_asyncpp import __version__
from lightning_asyncpp.cli import main
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import package_recipes, recipe_path, written_out
from lightning_asyncpp.tools.recipes import copy_recipe

FOLDER = Path(__file__).parents[1] / "recipes"
QUICKSTART = str(FOLDER / "quickstart.yaml")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_recipe_has_a_name() -> None:
    files = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.yaml")}
    assert {f"{name}.yaml": path for name, path in package_recipes().items()} == files


@pytest.mark.parametrize("given", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml", "./recipes/quickstart"])
def test_a_name_stands_for_the_packages_recipe(given: str) -> None:
    assert recipe_path(given) == QUICKSTART


def test_a_file_comes_before_a_name(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    assert recipe_path("quickstart") == QUICKSTART  # a folder is no recipe
    shutil.copy(QUICKSTART, tmp_path / "quickstart.yaml")
    assert recipe_path("quickstart.yaml") == "quickstart.yaml"


@pytest.mark.parametrize("given", ["trainer: {max_steps: 3}", "-", "/dev/stdin", "", "s3://bucket/recipe.yaml", "a\0b"])
def test_what_can_be_no_name_is_left_to_who_reads_it(given: str) -> None:
    assert recipe_path(given) == given


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("quikstart", "; did you mean quickstart? (`asyncpp recipes` lists them)"),
        ("frob", " (`asyncpp recipes` lists them)"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        recipe_path(given)
    assert str(caught.value).startswith(f"there is no recipe {given}, neither a file nor a name{nearest}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["fit", "--config", "quickstart"], ["fit", f"--config={QUICKSTART}"]),
        (["-c=quickstart", "fit"], [f"--config={QUICKSTART}", "fit"]),
        (["test", "--config=quickstart", "-c", "quickstart"], ["test", *[f"--config={QUICKSTART}"] * 2]),
        (["fit", "--name", "quickstart"], ["fit", "--name", "quickstart"]),
    ],
)
def test_commands_of_lightning_take_names(given: list[str], expected: list[str]) -> None:
    assert written_out(given) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--config", "quikstart"],
        ["validate", "--config=quikstart"],
        ["check", "--config", "quikstart"],
        ["plan", "quikstart"],
        ["recipes", "--copy", "quikstart"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_every_command_with_a_recipe_names_the_nearest(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncpp"])
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert (
        "there is no recipe quikstart, neither a file nor a name; did you mean quickstart?" in capsys.readouterr().err
    )


def test_a_recipe_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncpp"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--config", "quickstart", "--print_config"])
    assert "class_path: lightning_asyncpp.AsyncPipelineStrategy" in capsys.readouterr().out


def test_a_recipe_is_copied_over_no_other_file(tmp_path: Path) -> None:
    written = copy_recipe("quickstart", tmp_path / "mine")
    assert written.read_text() == Path(QUICKSTART).read_text()
    with pytest.raises(ConfigurationError, match=r"quickstart\.yaml: already there, and not written over"):
        copy_recipe("quickstart", tmp_path / "mine")


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with pytest.raises(SystemExit, match=r"^(None|0)?$"):
        main(["recipes", *arguments])
    return capsys.readouterr().out.splitlines()


def test_recipes_to_train_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, with a whole sentence in its line."""
    lines = listed(capsys)
    lines = lines[: lines.index("")]
    assert [line.split()[0] for line in lines] == list(package_recipes())
    assert all(line.endswith(".") and len(line) <= 120 for line in lines)


QUICK = """
import json, sys
sys.argv = ["asyncpp", *json.loads(sys.argv[1])]
try:
    from lightning_asyncpp.cli import main

    main()
except SystemExit as end:
    heavy = [name for name in ("torch", "lightning", "numpy") if name in sys.modules]
    print(json.dumps([end.code or 0, heavy]))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], f"asyncpp {__version__} (torch "),
        (["recipes"], "quickstart_sync "),
        (["recipes", "--copy", "quickstart"], "wrote quickstart.yaml"),
    ],
    ids=["version", "list", "copy"],
)
def test_what_needs_neither_torch_nor_lightning_does_not_wait_for_them(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-c", QUICK, json.dumps(arguments)]
    *printed, end = subprocess.check_output(command, text=True, timeout=60).splitlines()
    assert any(line.strip().startswith(said) for line in printed)
    assert json.loads(end) == [0, []]
