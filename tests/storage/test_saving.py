"""Checkpoints in one file or sharded load as saved, replace nothing else, run no code, and are refused if damaged."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.storage import (
    StorageError,
    commit,
    give_up,
    load,
    merged,
    new_target,
    read_index,
    remove_sharded,
    replace_durably,
    save_file,
    write_part,
)
from lightning_asyncpp.strategy_parts.mixin import DurableCheckpointIO
from tests.storage.saves import SAVES, Evil, assert_same, save_full, save_sharded, version_of

BASE = torch.arange(12.0)
CONTENT: dict[str, Any] = {
    "layout": {"transposed": BASE.reshape(3, 4).t(), "part": BASE[2:5], "all": BASE, "strided": BASE[::3]},
    "kinds": [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(5, dtype=torch.bfloat16), torch.tensor([True, False])],
    "ids": (torch.tensor([2**40]), {1: torch.zeros(1), "1": torch.ones(1)}),
    "rest": {"step": 3, "none": None, "name": "x", "dtype": torch.float16},
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
}
FORMS = pytest.mark.parametrize("form", ["full", "sharded"])


def write_sharded(content: Any, path: Path) -> None:
    target = new_target(path)
    commit(target, dict([write_part(target, 0, content)]))


def comparable(tree: Any) -> Any:
    """Return the tree with float8 tensors, which cannot be compared, converted to fp32."""
    if isinstance(tree, Tensor):
        return tree.float() if tree.dtype == torch.float8_e4m3fn else tree
    if isinstance(tree, dict):
        return {key: comparable(value) for key, value in tree.items()}
    return type(tree)(map(comparable, tree)) if isinstance(tree, (list, tuple)) else tree


@FORMS
def test_what_was_saved_comes_back(form: str, tmp_path: Path) -> None:
    """A file, or a part, is an ordinary torch file; a tensor saved at two places is loaded as a single one."""
    shared, path = torch.ones(3), tmp_path / "x.ckpt"
    (save_file if form == "full" else write_sharded)(CONTENT | {"a": shared, "b": [shared]}, path)
    (file,) = [path] if form == "full" else path.glob("*.pt")
    for found in (load(path), DurableCheckpointIO().load_checkpoint(path), torch.load(file, weights_only=True)):
        assert found["a"].untyped_storage()._cdata == found["b"][0].untyped_storage()._cdata
        assert_same(comparable({name: found[name] for name in CONTENT}), comparable(CONTENT))


def test_merged() -> None:
    """Dictionaries are merged by key, and lists of the same length by position; for other values the last wins."""
    one = {"a": {"x": 0}, "l": [{"p": 1}, {"q": 2}], "n": 1, "o": [1], "t": (1, {})}
    two = {"a": {"x": 1, "y": 3}, "l": [{"r": 1}, {"q": 4}], "n": 2, "o": [1, 2], "t": (2,)}
    expected = {"a": {"x": 1, "y": 3}, "l": [{"p": 1, "r": 1}, {"q": 4}], "n": 2, "o": [1, 2], "t": (2,)}
    assert merged([one, two]) == expected
    assert "y" not in one["a"]


def test_the_other_form_takes_the_name_and_leftovers_go(tmp_path: Path) -> None:
    """Leftovers of killed processes are removed, but only those of the checkpoint's own name."""
    path = tmp_path / "a[1].ckpt"
    others = ["a[1].ckpt.partial", ".a1.ckpt.01234567.partial", ".b.ckpt.01234567.partial", ".a[1].ckpt.notes.partial"]
    for name in others:
        (tmp_path / name).touch()
    for version, save in enumerate([save_full, save_sharded, save_full, save_sharded, save_sharded]):
        (tmp_path / ".a[1].ckpt.01234567.partial").touch()
        if path.is_dir():
            (path / "0123456789ab-stage-0000.pt").touch()
        save(str(path), version)
        assert version_of(path) == version
        assert sorted(os.listdir(tmp_path)) == sorted([*others, path.name])
    assert set(os.listdir(path)) == {"index.json", *read_index(path)}


@FORMS
@pytest.mark.parametrize("files", [["model.py"], ["index.json", "chunk-0-0.bin"]])
def test_a_folder_of_something_else_is_not_replaced(form: str, files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()
    for name in files:
        (path / name).write_text("{}")
    with pytest.raises(StorageError, match=rf"with other files \({files[-1]}\)"):
        SAVES[form](str(path), 1)
    assert sorted(os.listdir(path)) == sorted(files)
    assert os.listdir(tmp_path) == ["runs"]


def test_what_a_user_put_beside_the_parts_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_sharded(str(path), 1)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"with other files \(notes.txt\)"):
        save_full(str(path), 2)
    assert version_of(path) == 1
    save_sharded(str(path), 3)
    assert (version_of(path), (path / "notes.txt").read_text()) == (3, "mine")
    remove_sharded(path)
    assert not path.exists()


@FORMS
def test_links(form: str, tmp_path: Path) -> None:
    """Saving over a link, as made by ``save_last="link"``, or removing it changes the link and not its target."""
    path, link = tmp_path / "step=4.ckpt", tmp_path / "last.ckpt"
    SAVES[form](str(path), 1)
    link.symlink_to(path.name)
    SAVES[form](str(link), 2)
    assert (version_of(path), version_of(link), link.is_symlink()) == (1, 2, False)
    files = DurableCheckpointIO()
    files.remove_checkpoint(link)
    link.symlink_to(path.name)
    files.remove_checkpoint(link)
    assert not link.is_symlink()
    assert version_of(path) == 1
    files.remove_checkpoint(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("before", [0, 1])
def test_a_save_that_is_given_up_leaves_the_older_one(before: int, tmp_path: Path) -> None:
    """A save is given up because another rank failed, or a machine does not see a part."""
    path = tmp_path / "x.ckpt"
    if before:
        save_sharded(str(path), before)
    found = sorted(tmp_path.rglob("*"))
    target = new_target(path)
    name, size = write_part(target, 0, {"a": torch.zeros(3)})
    with pytest.raises(StorageError, match=r"stage-0001.pt is not there: all machines must see the same"):
        commit(target, {name: size, f"{target.save}-stage-0001.pt": 8})
    give_up(target)
    assert sorted(tmp_path.rglob("*")) == found


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole original file is read, although torch opens the file a second time."""
    path = tmp_path / "last.ckpt"
    save_file({"weight": torch.zeros(1000)}, path)
    mapped = torch.UntypedStorage.from_file

    def replaced_first(*args: Any) -> Any:
        save_file({"longer": "x" * 500, "weight": torch.ones(1000)}, path)
        return mapped(*args)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", staticmethod(replaced_first))
    assert torch.equal(load(path)["weight"], torch.zeros(1000))


# Absurd content of an index: its text, the files that it names or, in the last four, sizes of its files
ABSURD: list[Any] = [
    *("", "[" * 100_000, "[]", '{"format": "other"}', f'{{"format": {"9" * 5000}}}'),
    *('{"format": "lightning_asyncpp.sharded.99", "files": {}}', '{"format": "lightning_asyncpp.sharded.2"}'),
    *({"../x": 8}, {"/etc/passwd": 8}, {"..": 8}, {"": 8}, {"a\0b": 8}, {"index.json": 8}, {}, [], None, ["x"]),
    *({"0123456789ab-stage-0000.pt": 8}, {"0123456789ab-stage-0000.pt/../../x": 8}),
    *("8", -1, 10**30, 8.5),
]


@pytest.mark.parametrize("number", range(len(ABSURD)))
def test_absurd_values_in_an_index(number: int, tmp_path: Path) -> None:
    path, files = tmp_path / "x.ckpt", ABSURD[number]
    (tmp_path / "x").write_text("a secret")
    save_sharded(str(path), 1)
    index = json.loads((path / "index.json").read_text())
    if number > len(ABSURD) - 5:  # sizes of the existing files
        files = dict.fromkeys(index["files"], files)
    text = files if isinstance(files, str) else json.dumps({**index, "files": files})
    (path / "index.json").write_text(text)
    with pytest.raises(StorageError, match=r"x\.ckpt"):
        load(path)


@FORMS
def test_a_file_that_was_cut_short_or_is_missing(form: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    SAVES[form](str(path), 1)
    for file in path.iterdir() if path.is_dir() else [path]:
        content = file.read_bytes()
        for damage in (lambda file: os.truncate(file, file.stat().st_size - 40), os.unlink):
            damage(file)
            with pytest.raises(StorageError, match=file.name):
                load(path)
            file.write_bytes(content)
    load(path)


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
    if how != "bare pickle":  # proves that the trap works, so that the test can fail
        load(path, weights_only=False)
        assert trap.exists()


def test_a_folder_that_holds_code(tmp_path: Path) -> None:
    """A folder with code is refused even if its sizes are right, and even with ``weights_only=False``."""
    path, trap = tmp_path / "x.ckpt", tmp_path / "trap"
    save_sharded(str(path), 1)
    index = json.loads((path / "index.json").read_text())
    name = next(iter(index["files"]))
    torch.save({"state_dict": Evil(trap)}, path / name)
    index["files"][name] = (path / name).stat().st_size
    (path / "index.json").write_text(json.dumps(index))
    for weights_only in (None, True, False):
        with pytest.raises(StorageError, match="without running code"):
            load(path, weights_only)
    assert not trap.exists()


def test_it_says_why(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")  # cannot be opened even by root, unlike another user's file
    for name, why in ((".", "a folder without index.json"), ("absent", "there is no"), ("loop", "cannot be read")):
        with pytest.raises(StorageError, match=why):
            load(tmp_path / name)


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (made.append(Path(os.readlink(f"/proc/self/fd/{f}")).name), sync(f)))
    monkeypatch.setattr(os, "replace", lambda *names: (made.append("renamed"), replace(*names)))
    (tmp_path / "begun/new/inner").mkdir(parents=True)
    (tmp_path / "begun/new/inner/a").write_text("a")
    (tmp_path / "begun/new/b").write_text("b")
    replace_durably(tmp_path / "begun/new", tmp_path / "name")
    assert made == ["a", "inner", "b", "new", "renamed", tmp_path.name, "begun"]
    assert (tmp_path / "name/inner/a").read_text() == "a"
