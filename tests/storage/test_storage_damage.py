"""Damaged checkpoints are found, and hostile ones run nothing; whatever they hold, the process lives on."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.storage import StorageError, load
from tests.storage.saves import SAVES

FORMS = ("full", "sharded")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    for form in FORMS:
        SAVES[form](str(folder / form), 1)
    return {form: folder / form for form in FORMS}


def files_in(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def copied(path: Path, folder: Path) -> Path:
    target = folder / "copy"
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    return target


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_was_cut_short(form: str, saved: dict[str, Path], tmp_path: Path) -> None:
    path = copied(saved[form], tmp_path)
    for file in files_in(path):
        size = file.stat().st_size
        content = file.read_bytes()
        os.truncate(file, size - 40)
        with pytest.raises(StorageError):
            load(path)
        file.write_bytes(content)
    load(path)


def test_a_missing_file(saved: dict[str, Path], tmp_path: Path) -> None:
    for name in [file.name for file in files_in(saved["sharded"])]:
        path = copied(saved["sharded"], tmp_path)
        (path / name).unlink()
        with pytest.raises(StorageError, match=name):
            load(path)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("how", ["archive", "no archive", "bare pickle"])
def test_a_file_that_holds_code(how: str, tmp_path: Path) -> None:
    path, trap = tmp_path / "x.ckpt", tmp_path / "trap"
    if how == "bare pickle":
        path.write_bytes(pickle.dumps({"state_dict": Evil(trap)}))
    else:
        torch.save({"state_dict": Evil(trap)}, path, _use_new_zipfile_serialization=how == "archive")
    for weights_only in (None, True):
        with pytest.raises(StorageError, match=r"x.ckpt (cannot be read without running code|is damaged)"):
            load(path, weights_only)
    assert not trap.exists()
    if how != "bare pickle":  # else the test could not fail
        load(path, weights_only=False)
        assert trap.exists()


def test_a_folder_that_holds_code(saved: dict[str, Path], tmp_path: Path) -> None:
    """With sizes that are right; to trust it changes nothing."""
    path, trap = copied(saved["sharded"], tmp_path), tmp_path / "trap"
    index = json.loads((path / "index.json").read_text())
    name = next(iter(index["files"]))
    torch.save({"state_dict": Evil(trap)}, path / name)
    index["files"][name] = (path / name).stat().st_size
    (path / "index.json").write_text(json.dumps(index))
    for weights_only in (None, True, False):
        with pytest.raises(StorageError, match="without running code"):
            load(path, weights_only)
    assert not trap.exists()
