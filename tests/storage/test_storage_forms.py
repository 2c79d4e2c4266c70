"""Checkpoints in one file and sharded: what comes back, what they replace, and what they leave alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp import storage
from lightning_asyncpp.storage import (
    StorageError,
    Target,
    commit,
    give_up,
    load,
    merged,
    new_target,
    read_index,
    remove_sharded,
    save_file,
    write_part,
)
from lightning_asyncpp.strategy_parts.mixin import DurableCheckpointIO
from tests.helpers.same import assert_same
from tests.storage.saves import SAVES, save_full, save_sharded, version_of

BASE = torch.arange(12.0)
CONTENT: dict[str, Any] = {
    "layout": {"transposed": BASE.reshape(3, 4).t(), "part": BASE[2:5], "all": BASE, "strided": BASE[::3]},
    "kinds": [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(5, dtype=torch.bfloat16), torch.tensor([True, False])],
    "ids": (torch.tensor([2**40]), {1: torch.zeros(1), "1": torch.ones(1)}),
    "rest": {"step": 3, "none": None, "name": "x", "dtype": torch.float16},
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
}


def write_sharded(path: Path, content: Any = CONTENT) -> Target:
    target = new_target(path)
    commit(target, dict([write_part(target, 0, content)]))
    return target


def named_files(path: Path) -> set[str]:
    return {"index.json", *read_index(path)}


def comparable(tree: Any) -> Any:
    """With dtypes that can be compared."""
    if isinstance(tree, Tensor):
        return tree.float() if tree.dtype == torch.float8_e4m3fn else tree
    if isinstance(tree, dict):
        return {key: comparable(value) for key, value in tree.items()}
    return type(tree)(map(comparable, tree)) if isinstance(tree, (list, tuple)) else tree


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_what_was_saved_comes_back(form: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_file(CONTENT, path) if form == "full" else write_sharded(path)
    assert_same(comparable(load(path)), comparable(CONTENT))
    assert_same(comparable(DurableCheckpointIO().load_checkpoint(path)), comparable(CONTENT))
    if form == "full":  # an ordinary file of torch, and an ordinary archive
        for mapped in (False, True):
            assert_same(comparable(torch.load(path, weights_only=True, mmap=mapped)), comparable(CONTENT))


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_one_tensor_at_two_places_is_one_again(form: str, tmp_path: Path) -> None:
    """So that what is made of it is as small as what was saved."""
    shared = torch.ones(3)
    content = {"a": shared, "b": [shared]}
    path = tmp_path / "x.ckpt"
    save_file(content, path) if form == "full" else write_sharded(path, content)
    found = load(path)
    assert found["a"].untyped_storage()._cdata == found["b"][0].untyped_storage()._cdata


def test_what_has_no_content(tmp_path: Path) -> None:
    write_sharded(tmp_path / "x", {})
    assert load(tmp_path / "x") == {}


def test_a_part_is_an_ordinary_file_of_torch(tmp_path: Path) -> None:
    write_sharded(tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.pt")
    assert_same(comparable(torch.load(file, weights_only=True)), comparable(CONTENT))


def test_merged() -> None:
    """Dictionaries by keys, lists of one length by places; the last one counts."""
    one = {"a": {"x": 0}, "l": [{"p": 1}, {"q": 2}], "n": 1, "o": [1], "t": (1, {})}
    two = {"a": {"x": 1, "y": 3}, "l": [{"r": 1}, {"q": 4}], "n": 2, "o": [1, 2], "t": (2,)}
    expected = {"a": {"x": 1, "y": 3}, "l": [{"p": 1, "r": 1}, {"q": 4}], "n": 2, "o": [1, 2], "t": (2,)}
    assert merged([one, two]) == expected
    assert merged([two]) is two
    assert "y" not in one["a"]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_files_are_as_readable_as_others(form: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        SAVES[form](str(tmp_path / "x.ckpt"), 1)
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}
    finally:
        os.umask(before)


def test_the_other_form_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for version, save in enumerate([save_full, save_sharded, save_full, save_sharded, save_sharded]):
        save(str(path), version)
        assert version_of(path) == version
        assert os.listdir(tmp_path) == ["x.ckpt"]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    """Of killed processes, and of this name alone."""
    path = tmp_path / "a[1].ckpt"
    others = ["a[1].ckpt.partial", ".a1.ckpt.01234567.partial", ".b.ckpt.01234567.partial", ".a[1].ckpt.notes.partial"]
    leftovers = [".a[1].ckpt.01234567.partial", ".a[1].ckpt.89abcdef.partial"]
    for name in (*others, *leftovers):
        (tmp_path / name).touch()
    (tmp_path / ".a[1].ckpt.00000000.partial").mkdir()
    (tmp_path / ".a[1].ckpt.00000000.partial/file").touch()
    save_full(str(path), 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, path.name])
    for name in leftovers:
        (tmp_path / name).touch()
    save_sharded(str(path), 2)
    for name in ("0123456789ab-stage-0000.pt", "0123456789ab-index.json"):
        (path / name).touch()
    (path / "notes.txt").touch()
    save_sharded(str(path), 3)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, path.name])
    assert set(os.listdir(path)) == {"notes.txt", *named_files(path)}


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("files", [["model.py"], ["index.json", "chunk-0-0.bin"]])
def test_a_folder_of_something_else_is_not_replaced(form: str, files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()
    for name in files:
        (path / name).write_text("{}")
    with pytest.raises(StorageError, match=rf"could not .*holds something else \({files[-1]}\); name another"):
        SAVES[form](str(path), 1)
    assert sorted(os.listdir(path)) == sorted(files)
    assert os.listdir(tmp_path) == ["runs"]


def test_what_a_user_put_beside_the_parts_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_sharded(str(path), 1)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"holds something else \(notes.txt\)"):
        save_full(str(path), 2)
    assert version_of(path) == 1
    save_sharded(str(path), 3)
    assert (version_of(path), (path / "notes.txt").read_text()) == (3, "mine")
    remove_sharded(path)
    assert not path.exists()


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_links(form: str, tmp_path: Path) -> None:
    """As ``save_last="link"`` makes them: saving over one, and removing it, is about the link."""
    path, link = tmp_path / "step=4.ckpt", tmp_path / "last.ckpt"
    SAVES[form](str(path), 1)
    link.symlink_to(path.name)
    assert version_of(link) == 1
    files = DurableCheckpointIO()
    SAVES[form](str(link), 2)
    assert (version_of(path), version_of(link), link.is_symlink()) == (1, 2, False)
    files.remove_checkpoint(link)
    link.symlink_to(path.name)
    files.remove_checkpoint(link)
    assert not link.is_symlink()
    assert version_of(path) == 1
    files.remove_checkpoint(path)
    assert os.listdir(tmp_path) == []


def test_a_save_that_is_given_up(tmp_path: Path) -> None:
    """Of another rank's failure; the older one stays."""
    path = tmp_path / "x.ckpt"
    for version in (None, 1):
        if version is not None:
            save_sharded(str(path), version)
        before = sorted(path.rglob("*"))
        target = new_target(path)
        write_part(target, 0, {"a": torch.zeros(3)})
        give_up(target)
        assert sorted(path.rglob("*")) == before
        assert len(os.listdir(tmp_path)) == (version is not None)
    assert version_of(path) == 1


def test_a_part_that_other_machines_do_not_see(tmp_path: Path) -> None:
    target = new_target(tmp_path / "x.ckpt")
    name, size = write_part(target, 0, {"a": torch.zeros(3)})
    with pytest.raises(StorageError, match=r"stage-0001.pt is not there: all machines must see the same"):
        commit(target, {name: size, f"{target.save}-stage-0001.pt": 8})
    give_up(target)
    assert os.listdir(tmp_path) == []


def test_a_save_that_fails_at_its_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index is in place already, and what that names stays."""
    path = tmp_path / "x.ckpt"
    save_sharded(str(path), 1)
    sync, synced = storage.sync, []

    def fails(folder: Path) -> None:
        synced.append(folder)
        if folder == path and not before & {*read_index(path)}:
            raise OSError("no")
        sync(folder)

    before = named_files(path)
    monkeypatch.setattr(storage, "sync", fails)
    with pytest.raises(StorageError, match="could not be written: OSError: no"):
        save_sharded(str(path), 2)
    monkeypatch.undo()
    assert version_of(path) == 2
    save_sharded(str(path), 3)
    assert set(os.listdir(path)) == named_files(path)


@pytest.mark.parametrize(
    "files",
    [
        {"../x": 8}, {"/etc/passwd": 8}, {"..": 8}, {"": 8}, {"a\0b": 8}, {"index.json": 8}, {}, [], None, ["x"],
        {"0123456789ab-stage-0000.pt": 8}, {"0123456789ab-stage-0000.pt/../../x": 8},
    ],
    ids=str,
)  # fmt: skip
def test_absurd_values_in_an_index(files: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    (tmp_path / "x").write_text("a secret")
    save_sharded(str(path), 1)
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({**index, "files": files}))
    with pytest.raises(StorageError, match=r"x\.ckpt"):
        load(path)


@pytest.mark.parametrize("size", ["8", None, -1, 10**30, [], 8.5])
def test_absurd_sizes_in_an_index(size: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_sharded(str(path), 1)
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({**index, "files": dict.fromkeys(index["files"], size)}))
    with pytest.raises(StorageError, match=r"bytes, and had"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged or no checkpoint"), ("[" * 100_000, "damaged or no checkpoint"), ("[]", "is not the index"),
        ('{"format": "other"}', "is not the index"), ("\xff", "damaged or no checkpoint"),
        ('{"format": "lightning_asyncpp.sharded.99", "files": {}}', "that this release reads"),
        ('{"format": "lightning_asyncpp.sharded.2"}', "is not the index"),
        (f'{{"format": {"9" * 5000}}}', "damaged or no checkpoint"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_index(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(text.encode("latin1"))
    with pytest.raises(StorageError, match=message):
        load(tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no checkpoint .*absent"):
        load(tmp_path / "absent")
    with pytest.raises(StorageError, match=r"a folder without index.json"):
        load(tmp_path)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there at first is read, all of it, though torch opens it a second time."""
    path = tmp_path / "last.ckpt"
    save_file({"weight": torch.zeros(1000)}, path)
    mapped = torch.UntypedStorage.from_file

    def replaced_first(*args: Any) -> Any:
        save_file({"longer": "x" * 500, "weight": torch.ones(1000)}, path)
        return mapped(*args)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", staticmethod(replaced_first))
    assert torch.equal(load(path)["weight"], torch.zeros(1000))
