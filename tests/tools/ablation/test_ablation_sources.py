"""The user's own code: which files decide a training, and what becomes of one whose code changes meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_asyncpp.tools.ablation.grid import CellKey
from lightning_asyncpp.tools.ablation.recipe import cell_config as sources
from lightning_asyncpp.tools.ablation.recipe.cell_config import own_sources
from lightning_asyncpp.tools.ablation.recipe.rows import make_rows
from lightning_asyncpp.tools.ablation.recipe.yaml_files import read_yaml, write_yaml
from lightning_asyncpp.tools.ablation.run.cell import CHANGED, ChangedError, main, train
from lightning_asyncpp.tools.ablation.run.training_folders import Table
from tests.tools.ablation.small import load_recipe, write_ablation

FILES = {
    "__init__.py": "from own_package.model import Model as M\n",
    "model.py": (
        "from lightning_asyncpp import GPTModule\nfrom own_package import base\n"
        "class Model(base.Base, GPTModule): pass\n"
    ),
    "base.py": "class Root: pass\nclass Base(Root): pass\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's, ``own_package``, that can be imported."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget(monkeypatch)
    return folder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    sources._digests.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        monkeypatch.delitem(sys.modules, name)


CONFIG = {"model": {"class_path": "own_package.M"}, "data": {"class_path": "lightning_asyncpp.data.TextDataModule"}}


def test_the_files_of_a_class_and_of_its_bases_count_wherever_it_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own_sources(CONFIG)
    assert list(first) == ["own_package.M", "own_package.model.Model", "own_package.base.Base"]
    for name, changed in zip(FILES, first):
        forget(monkeypatch)
        (package / name).write_text(FILES[name] + "# another\n")
        second = own_sources(CONFIG)
        assert [key for key in first if second[key] != first[key]] == [changed]
        (package / name).write_text(FILES[name])


def test_a_class_in_the_file_that_its_path_names_has_the_digest_of_that_file_alone(package: Path) -> None:
    assert list(own_sources({"class_path": "own_package.base.Base"})) == ["own_package.base.Base"]


def test_code_that_cannot_be_imported_counts_by_the_file_of_its_path(package: Path) -> None:
    (package / "broken.py").write_text("1 / 0\n")
    assert list(own_sources({"class_path": "own_package.broken.Model"})) == ["own_package.broken.Model"]


def test_a_training_whose_code_changed_since_it_got_its_name_is_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ablation(tmp_path, text=False)
    fit = read_yaml(tmp_path / "fit.yaml")
    fit["model"]["class_path"] = "own_package.M"
    write_yaml(tmp_path / "fit.yaml", fit)
    (row,) = make_rows(load_recipe(path))
    folder = Table(load_recipe(path), [row], tmp_path / "out").make_cell(CellKey(row.key, 0.01, 1), "cpu")
    forget(monkeypatch)
    (package / "base.py").write_text(FILES["base.py"] + "# another\n")
    with pytest.raises(ChangedError, match=r"the code of own_package\.base\.Base has changed since"):
        train(folder)
    with pytest.raises(SystemExit) as end:
        main([str(folder)])
    assert end.value.code == CHANGED
