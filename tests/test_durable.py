"""Files appear under their names when their content is on the disk, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.storage import replace_durably


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced and renamed, in order."""
    made: list[str] = []
    sync, replace = os.fsync, os.replace

    def recorded_sync(descriptor: int) -> None:
        made.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def recorded_replace(source: Any, target: Any) -> None:
        made.append(f"{Path(source).name} -> {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return made


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "name").write_text("old")
    replace_durably(tmp_path / "new", tmp_path / "name")
    assert calls == ["new", "new -> name", tmp_path.name]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("name", "new")]


def test_a_folder_is_with_all_that_is_in_it(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "begun/new/inner").mkdir(parents=True)
    (tmp_path / "begun/new/inner/a").write_text("a")
    (tmp_path / "begun/new/b").write_text("b")
    replace_durably(tmp_path / "begun/new", tmp_path / "name")
    assert calls == ["a", "inner", "b", "new", "new -> name", tmp_path.name, "begun"]
    assert (tmp_path / "name/inner/a").read_text() == "a"


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "name").write_text("old")
    monkeypatch.setattr(os, name, _full)
    with pytest.raises(OSError, match="no space"):
        replace_durably(tmp_path / "new", tmp_path / "name")
    assert (tmp_path / "name").read_text() == "old"


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path: Path) -> None:
    for folder in ("new", "name"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(folder)
    with pytest.raises(OSError, match="name"):
        replace_durably(tmp_path / "new", tmp_path / "name")
    assert (tmp_path / "name/file").read_text() == "name"


def _full(*_: Any) -> None:
    raise OSError("no space")
