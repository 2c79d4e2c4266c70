"""A save that fails or is killed at any of its system calls leaves the older checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.storage import is_sharded, read_index, remove_sharded
from tests.storage.faults import FAIL, KILL, Call, Ended, Fault, run
from tests.storage.saves import SAVES, save_sharded, version_of

OLD, NEW, NEXT = 1, 2, 3
WAYS = pytest.mark.parametrize(
    ("save", "before"), [(save, before) for save in ("full", "sharded") for before in ("", save)]
)
EVERYTHING = pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])


def prepared(folder: Path, before: str) -> Path:
    """Return a path in an emptied folder, with an older checkpoint of the form ``before`` unless that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / "step=4[a].ckpt"
    if before:
        SAVES[before](str(path), OLD)
    return path


def check(path: Path, before: str, save: str, ended: Ended, mode: int) -> None:
    """Check that a checkpoint that exists is complete, and that the next save replaces it and removes leftovers."""
    assert ended.code in ((0, 1) if mode == FAIL else (-signal.SIGKILL,)), ended
    if ended.code == 1:
        assert ended.raised.startswith("StorageError: a checkpoint could not be written: "), ended.raised
    if path.exists():
        allowed = {NEW} if ended.code == 0 else {OLD, NEW} if before else {NEW}
        assert version_of(path) in allowed
    else:
        assert not before
        assert ended.code != 0
    SAVES[save](str(path), NEXT)
    assert version_of(path) == NEXT
    assert os.listdir(path.parent) == [path.name]
    if is_sharded(path):
        assert set(os.listdir(path)) == {"index.json", *read_index(path)}


def points(count: int, everything: bool, some: int) -> list[int]:
    """Return the numbers of all system calls, or of some random ones."""
    calls = list(range(1, count + 1))
    return calls if everything else sorted(random.Random(count).sample(calls, some))


@EVERYTHING
@WAYS
def test_every_system_call(save: str, before: str, everything: bool, tmp_path: Path) -> None:
    """A fault at each of all system calls, or at each of two without ``everything``, leaves no broken checkpoint."""
    folder = tmp_path / "run"
    path = prepared(folder, before)
    fault = Fault(folder)
    whole = run(fault, SAVES[save], str(path), NEW)
    assert whole.code == 0, whole.raised
    assert version_of(path) == NEW
    for mode in (FAIL, KILL):
        for at in points(len(whole.calls), everything, some=2):
            path = prepared(folder, before)
            error = (errno.ENOSPC, errno.EIO)[at % 2]
            ended = run(fault._replace(mode=mode, at=at, error=error), SAVES[save], str(path), NEW)
            call = whole.calls[at - 1]
            try:
                check(path, before, save, ended, mode)
            except AssertionError as wrong:
                raise AssertionError(f"call {at} of {len(whole.calls)}, mode {mode}: {call}") from wrong


@EVERYTHING
def test_removing(everything: bool, tmp_path: Path) -> None:
    """A removal that is killed leaves a complete checkpoint, or only leftovers with another name."""
    folder = tmp_path / "run"
    path = prepared(folder, "sharded")
    fault = Fault(folder)
    count = len(run(fault, remove_sharded, path).calls)
    assert not path.exists()
    for at in points(count, everything, some=3):
        path = prepared(folder, "sharded")
        assert run(fault._replace(mode=KILL, at=at), remove_sharded, path).code == -signal.SIGKILL
        assert not path.exists() or version_of(path) == OLD
        save_sharded(str(path), NEXT)
        assert os.listdir(folder) == [path.name]


@WAYS
def test_the_order_in_which_it_reaches_the_disk(save: str, before: str, tmp_path: Path) -> None:
    """A checkpoint also survives a loss of power, whatever the file system has not written to the disk by then."""
    path = prepared(tmp_path / "run", before)
    deep = path.parent / "new/folders" / path.name if not before else path
    ended = run(Fault(tmp_path / "run"), SAVES[save], str(deep), NEW)
    assert version_of(deep) == NEW
    seen = replay(ended.calls, str(deep))
    assert {str(file) for file in ([deep] if deep.is_file() else deep.iterdir())} <= seen, "no call was missed"


def replay(calls: list[Call], path: str) -> set[str]:
    """Check after each call which contents of files and names in folders may not be on the disk yet.

    Return the final paths of all files that were written.
    """
    contents: set[str] = set()
    names: set[str] = set()
    seen: set[str] = set()
    final, committed = {path, f"{path}/index.json"}, False
    for call in calls:
        if call.what in ("create", "write"):
            contents.add(call.path)
            seen.add(call.path)
        if call.what in ("create", "os.mkdir"):
            names.add(call.path)
        if call.what == "sync":
            contents.discard(call.path)
            names = {name for name in names if os.path.dirname(name) != call.path}
        if call.what == "os.remove" and call.path.startswith(path):
            assert committed, f"{call.path} goes before the new checkpoint is there"
            assert not names & final, f"{call.path} goes too early"
        if call.what == "os.rename":
            if call.target in final:
                inside = call.path if call.target == path else path
                nameless = {name for name in names - {call.path} if name.startswith(f"{inside}/")}
                lost = nameless | {name for name in contents if name.startswith(inside)}
                assert not lost, f"{lost} may be lost when {call.target} is there"
                committed = True
            contents, names, seen = (
                {re.sub(f"^{re.escape(call.path)}(?=/|$)", call.target, name) for name in some}
                for some in (contents, names - {call.path}, seen)
            )
            names.add(call.target)
    assert committed
    assert not contents, "all is on the disk"
    assert not names & {*final, *map(str, Path(path).parents)}
    return seen


def with_small_files(save: Any, path: str, version: int) -> None:
    """Save while no file may exceed 3000 bytes, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    save(path, version)


@pytest.mark.parametrize("save", ["full", "sharded"])
def test_a_full_disk(save: str, tmp_path: Path) -> None:
    path = prepared(tmp_path / "disk", save)
    ended = run(Fault(tmp_path / "elsewhere"), with_small_files, SAVES[save], str(path), NEW)
    assert ended.raised.startswith("StorageError"), ended
    assert version_of(path) == OLD
    assert os.listdir(path.parent) == [path.name]
