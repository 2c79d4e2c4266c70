"""A checkpoint that is replaced while it is read: what is read is one save, whole, and what was compared is loaded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.storage import opened as module
from lightning_asyncpp.storage.loading import load, verify
from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.opened import open_checkpoint, opened
from tests.storage.saves import SAVES, version_of
from tests.workers import worker_context

FORMS = ("full", "sharded")


def whole(found: Any) -> int:
    """The version of what was loaded."""
    version = int(found["step"])
    for layer in range(2):
        assert torch.equal(found["state_dict"][f"{layer}.weight"], torch.full((40, 30), version + layer / 10))
    return version


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("next_form", [*FORMS, "nothing"])
def test_what_is_open_stays(form: str, next_form: str, tmp_path: Path) -> None:
    """Also where a run removes it, or saves in the other form."""
    path = tmp_path / "last.ckpt"
    SAVES[form](str(path), 1)
    with opened(path) as checkpoint:
        if next_form == "nothing":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            SAVES[next_form](str(path), 2)
        assert checkpoint.damages() == []
        found = checkpoint.load()
    assert whole(found) == 1
    if next_form != "nothing":
        assert version_of(path) == 2


@pytest.mark.parametrize("form", FORMS)
def test_an_identity_is_that_of_a_save(form: str, tmp_path: Path) -> None:
    """A copy has the same one; another save of the same content in the same size has another, by what it holds."""
    path, copy = tmp_path / "last.ckpt", tmp_path / "copy.ckpt"
    identities = []
    for version in (1, 2):
        SAVES[form](str(path), version)
        shutil.copytree(path, copy, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, copy)
        with opened(path) as one, opened(copy) as other:
            assert one.identity == other.identity
            identities.append(one.identity)
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    assert identities[0] != identities[1]


def saving(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> list[Path]:
    """Has a run replace a folder before each of the first ``times`` files of it is opened; which were."""
    asked: list[Path] = []
    before: Callable[[Path], Any] = module._opened_file

    def open_file(file: Path) -> Any:
        if len(asked) < times:
            SAVES["sharded"](str(path), len(asked) + 2)
        asked.append(file)
        return before(file)

    monkeypatch.setattr(module, "_opened_file", open_file)
    return asked


def test_a_folder_that_is_replaced_while_it_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    SAVES["sharded"](str(path), 1)
    saving(monkeypatch, path, 3)
    assert whole(load(path)) == 4
    assert verify(path) == []


def test_a_folder_that_is_replaced_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    SAVES["sharded"](str(path), 1)
    asked = saving(monkeypatch, path, 10**6)
    with pytest.raises(
        StorageError, match=r"last\.ckpt is being replaced by a run, .*: copy it, or name one that stays"
    ):
        open_checkpoint(path)
    assert len(asked) < 100


def _save(form: str, path: str, seconds: float) -> None:
    version, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        version += 1
        SAVES[form](path, version)


@pytest.mark.parametrize("form", FORMS)
def test_reading_beside_a_run_that_saves(form: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    SAVES[form](str(path), 0)
    process = worker_context().Process(target=_save, args=(form, str(path), 2.0), daemon=True)
    process.start()
    versions = []
    while process.is_alive():
        with opened(path) as checkpoint:
            assert checkpoint.damages() == []
            versions.append(whole(checkpoint.load()))
    assert versions == sorted(versions)
    assert len(set(versions)) > 3
