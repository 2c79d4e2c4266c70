"""Recipes of the package are found by their names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightning_asyncpp.cli import main
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import package_recipes, recipe_path, written_out
from lightning_asyncpp.tools.recipes import copy_recipe

FOLDER = Path(__file__).parents[1] / "recipes"
QUICKSTART = str(FOLDER / "quickstart.yaml")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_recipe_has_a_name_and_a_line_that_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.yaml")}
    assert {f"{name}.yaml": path for name, path in package_recipes().items()} == files
    with pytest.raises(SystemExit, match=r"^(None|0)?$"):
        main(["recipes"])
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(package_recipes())
    assert all(line.endswith(".") and len(line) <= 120 for line in lines)


@pytest.mark.parametrize("given", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml"])
def test_a_name_stands_for_the_packages_recipe(given: str) -> None:
    assert written_out(["fit", "--config", given]) == ["fit", f"--config={QUICKSTART}"]


@pytest.mark.parametrize("given", ["trainer: {max_steps: 3}", "-", "", "s3://bucket/recipe.yaml", "a\0b"])
def test_what_can_be_no_name_is_left_to_who_reads_it(given: str) -> None:
    assert recipe_path(given) == given


def test_a_file_comes_before_a_name_and_a_folder_does_not(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    assert recipe_path("quickstart") == QUICKSTART
    shutil.copy(QUICKSTART, tmp_path / "quickstart.yaml")
    assert recipe_path("quickstart.yaml") == "quickstart.yaml"


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "quikstart"])
    assert (
        "there is no recipe quikstart, as a file or in the package; did you mean quickstart?" in capsys.readouterr().err
    )


def test_a_recipe_is_copied_over_no_other_file(tmp_path: Path) -> None:
    written = copy_recipe("quickstart", tmp_path / "mine")
    assert written.read_text() == Path(QUICKSTART).read_text()
    with pytest.raises(ConfigurationError, match=r"quickstart\.yaml exists already; name another folder"):
        copy_recipe("quickstart", tmp_path / "mine")
