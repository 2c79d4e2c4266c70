"""Checkpoints in one file and sharded: what comes back, what they replace, and what they leave alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from lightning_asyncpp.storage import durable
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.nested import take_apart
from lightning_asyncpp.storage.sharded import (
    Shard,
    Target,
    commit,
    give_up,
    index_bytes,
    named_files,
    new_target,
    read_index,
    remove_sharded,
    write_shard,
)
from lightning_asyncpp.storage.whole import save_file
from lightning_asyncpp.strategy_parts.checkpoint_io import DurableCheckpointIO
from tests.storage.saves import SAVES, save_full, save_sharded, version_of
from tests.storage.test_storage_tree import assert_same

BASE = torch.arange(12.0)
CONTENT: dict[str, Any] = {
    "layout": {"transposed": BASE.reshape(3, 4).t(), "part": BASE[2:5], "all": BASE, "strided": BASE[::3]},
    "kinds": [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(5, dtype=torch.bfloat16), torch.tensor([True, False])],
    "ids": (torch.tensor([2**40]), {1: torch.zeros(1), "1": torch.ones(1)}),
    "rest": {"step": 3, "none": None, "name": "x", "dtype": torch.float16},
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
}


def write_sharded(path: Path, content: Any = CONTENT) -> Target:
    skeleton, tensors = take_apart(content, "stage-0000")
    target = new_target(path)
    commit(target, [write_shard(target, "stage-0000", tensors)], skeleton, {"facts": 1})
    return target


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


def test_the_tensors_of_a_part_are_those_of_safetensors(tmp_path: Path) -> None:
    write_sharded(tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.safetensors")
    found = load_safetensors(file)
    assert torch.equal(found["layout/transposed"], CONTENT["layout"]["transposed"])
    assert found["kinds/2"].dtype == torch.bfloat16


def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    """torch.distributed.checkpoint, by names."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    reader = getattr(dcp, "HuggingFaceStorageReader", None)
    if reader is None:
        pytest.skip("this version of torch has no HuggingFaceStorageReader")
    path = tmp_path / "x.ckpt"
    save_sharded(str(path), 1)
    save_sharded(str(path), 2)
    expected = load(path)["state_dict"]
    into = {f"state_dict/{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(into, storage_reader=reader(str(path)), no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(into[f"state_dict/{name}"], tensor)


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
    for name in ("0123456789ab-stage-0000.safetensors", ".tmpAbC123", ".index.json.01234567", "0123456789ab-run.pt"):
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
    with pytest.raises(StorageError, match=rf"{path} could not .*holds something else \({files[-1]}\); name another"):
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
    remove_sharded(path)
    assert os.listdir(path) == ["notes.txt"]


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
        write_shard(target, "stage-0000", {"a": torch.zeros(3)})
        give_up(target)
        assert sorted(path.rglob("*")) == before
        assert len(os.listdir(tmp_path)) == (version is not None)
    assert version_of(path) == 1


def test_a_part_that_other_machines_do_not_see(tmp_path: Path) -> None:
    target = new_target(tmp_path / "x.ckpt")
    shard = write_shard(target, "stage-0000", {"a": torch.zeros(3)})
    elsewhere = Shard("stage-0001", f"{target.save}-stage-0001.safetensors", 8)
    with pytest.raises(StorageError, match=r"stage-0001.safetensors is not there: all machines must see the same"):
        commit(target, [shard, elsewhere], {}, {})
    give_up(target)
    assert os.listdir(tmp_path) == []


def test_a_save_that_fails_at_its_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index is in place already, and what that names stays."""
    path = tmp_path / "x.ckpt"
    save_sharded(str(path), 1)
    sync, synced = durable.sync, []

    def fails(folder: Path) -> None:
        synced.append(folder)
        if folder == path and read_index(path)["run"]["file"] not in before:
            raise OSError("no")
        sync(folder)

    before = named_files(path)
    monkeypatch.setattr(durable, "sync", fails)
    with pytest.raises(StorageError, match="could not be written: OSError: no"):
        save_sharded(str(path), 2)
    monkeypatch.undo()
    assert version_of(path) == 2
    save_sharded(str(path), 3)
    assert set(os.listdir(path)) == named_files(path)


def rewritten(path: Path, **changes: Any) -> None:
    """An index with other values."""
    index = read_index(path)
    run, shards = Shard(**index["run"]), [Shard(**shard) for shard in index["shards"]]
    if "run" in changes:
        run = run._replace(**changes["run"])
    if "shard" in changes:
        shards[0] = shards[0]._replace(**changes["shard"])
    (path / "index.json").write_bytes(index_bytes(run, shards, changes.get("about", {})))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": {"file": "../x"}}, {"shard": {"file": "../x"}}, {"shard": {"file": "/etc/passwd"}},
        {"shard": {"file": ".."}}, {"shard": {"file": ""}}, {"shard": {"file": "a\0b"}}, {"shard": {"file": 3}},
        {"shard": {"num_bytes": "8"}}, {"shard": {"num_bytes": True}}, {"shard": {"num_bytes": -1}},
        {"shard": {"num_bytes": 10**30}}, {"shard": {"name": None}}, {"shard": {"name": "stage-0007"}},
        {"shard": {"file": "absent"}}, {"run": {"file": "index.json"}},
    ],
    ids=str,
)  # fmt: skip
def test_absurd_values_in_an_index(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    (tmp_path / "x").write_text("a secret")
    save_sharded(str(path), 1)
    rewritten(path, **changes)
    with pytest.raises(StorageError, match=r"x\.ckpt"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged or no checkpoint"), ("[" * 100_000, "damaged or no checkpoint"), ("[]", "is not the index"),
        ('{"format": "other"}', "is not the index"), ("\xff", "damaged or no checkpoint"),
        ('{"format": "lightning_asyncpp.sharded", "version": 99}', "has version 99 .* this release reads 1"),
        ('{"format": "lightning_asyncpp.sharded", "version": 1}', "damaged or no checkpoint"),
        (f'{{"format": {"9" * 5000}}}', "damaged or no checkpoint"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_index(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(text.encode("latin1"))
    with pytest.raises(StorageError, match=message):
        load(tmp_path)


def test_a_part_with_other_tensors(tmp_path: Path) -> None:
    """Of another model, with sizes that are right."""
    path = tmp_path / "x.ckpt"
    write_sharded(path, {"a": torch.zeros(2, 3), "b": torch.zeros(2)})
    other = tmp_path / "y.ckpt"
    for wrong in ({"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3).double()}, {"c": torch.zeros(2, 3)}):
        write_sharded(other, {**{"b": torch.zeros(2)}, **wrong})
        (file,) = other.glob("*.safetensors")
        shard = Shard(**read_index(other)["shards"][0])
        (path / "0123456789ab-stage-0000.safetensors").write_bytes(file.read_bytes())
        rewritten(path, shard=shard._replace(file="0123456789ab-stage-0000.safetensors")._asdict())
        with pytest.raises(StorageError, match=r"another shape or dtype|damaged or no checkpoint"):
            load(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no checkpoint .*absent"):
        load(tmp_path / "absent")
    with pytest.raises(StorageError, match=r"a folder without index.json"):
        load(tmp_path)


def test_the_index_says_what_wrote_it(tmp_path: Path) -> None:
    write_sharded(tmp_path / "x")
    index = json.loads((tmp_path / "x/index.json").read_text())
    assert index["about"] == {"facts": 1}
    assert [shard["name"] for shard in index["shards"]] == ["stage-0000"]


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
