"""A folder of checkpoints belongs to one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.storage import lease
from lightning_asyncpp.storage.lease import Leases
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.lock import LEASE, FolderLock, is_locked_by_another
from lightning_asyncpp.storage.names import StorageError, beside
from lightning_asyncpp.storage.whole import save_file
from tests.workers import end_with_parent, worker_context


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.0)


@contextmanager
def another_run(folder: Path, keeps: bool = True) -> Iterator[Any]:
    """A process that writes into a folder, a run or a single save, and is killed at the end."""
    here, there = Pipe()
    process = worker_context().Process(target=_write_until_killed, args=(folder, there, keeps), daemon=True)
    process.start()
    assert here.recv() == "holds"
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _write_until_killed(folder: Path, said: Any, keeps: bool) -> None:
    end_with_parent()
    leases = Leases()
    if keeps:
        leases.begin({"run": "3f2a"}, [folder])
    leases.hold(folder)
    said.send("holds")
    signal.pause()


def test_a_folder_of_another_run_is_refused_until_it_is_dead(tmp_path: Path) -> None:
    own, refused = Leases(), rf"{tmp_path} is where another run .*run 3f2a, .*another dirpath of ModelCheckpoint"
    with another_run(tmp_path):
        with pytest.raises(StorageError, match=refused):
            own.begin({"run": "b"}, [tmp_path, tmp_path / "later"])
        with pytest.raises(StorageError, match=refused):
            own.hold(tmp_path)
        own.hold(tmp_path / "later")
    own.hold(tmp_path)  # killed, which leaves the file
    assert json.loads((tmp_path / LEASE).read_text())["run"] == "b"
    own.end()
    assert os.listdir(tmp_path) == ["later"]
    assert not os.listdir(tmp_path / "later")


def test_a_file_that_somebody_names_is_written_beside_those_of_a_run(tmp_path: Path) -> None:
    """Such as the last weights of one run in a folder where another one still trains: they are not lost."""
    ended, going_on = Leases(), Leases()
    going_on.begin({}, [tmp_path / "own"])
    with another_run(tmp_path) as other:
        for leases in (ended, going_on):
            leases.hold(tmp_path)()
        assert json.loads((tmp_path / LEASE).read_text())["process"] == other.pid


def test_what_ends_meanwhile_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 20.0)
    with another_run(tmp_path) as other:
        monkeypatch.setattr("time.sleep", lambda seconds: other.kill())
        leases = Leases()
        leases.begin({}, [tmp_path])
        leases.end()


def test_a_process_does_not_compete_with_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first, second = Leases(), Leases()
    for leases, name in ((first, "run"), (second, "link"), (first, "run/../link")):
        leases.begin({}, [tmp_path / name])
        leases.hold(tmp_path / name)
    Leases().hold(tmp_path / "link")()
    assert not is_locked_by_another(tmp_path / "link")
    second.end()
    assert (tmp_path / "run" / LEASE).exists()
    first.end()
    first.end()
    assert os.listdir(tmp_path / "run") == []


def test_a_save_alone_holds_it_for_its_time(tmp_path: Path) -> None:
    release = Leases().hold(tmp_path / "new")
    assert os.listdir(tmp_path / "new") == [LEASE]
    release()
    assert os.listdir(tmp_path / "new") == []


def test_a_save_alone_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes; a run is not."""
    with another_run(tmp_path, keeps=False) as other:
        waited = []

        def wait(*_: Any) -> None:
            waited.append(1)
            if len(waited) == 5:
                other.kill()
                other.join()
            raise BlockingIOError

        monkeypatch.setattr(lease, "FolderLock", lambda *a: FolderLock(*a) if len(waited) == 5 else wait())
        Leases().hold(tmp_path)()
    assert len(waited) == 5


def test_what_another_run_is_writing_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    partial = beside(path)
    with another_run(tmp_path):
        partial.write_text("half of it")
        save_file({"x": torch.ones(2)}, path)  # such as `asyncpp checkpoint convert`
        assert partial.exists()
        assert load(path)["x"].tolist() == [1, 1]
    save_file({"x": torch.zeros(2)}, path)
    assert not partial.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    leases = Leases()
    leases.begin({}, [tmp_path])
    assert not is_locked_by_another(tmp_path)
    leases.end()


def test_a_lock_is_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had it removes the file after another process has opened it, and before that one locks it."""
    flock, calls = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / LEASE).unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = FolderLock(tmp_path, lambda: b"{}", patience=5.0)
    assert len(calls) == 2
    assert (tmp_path / LEASE).read_text() == "{}"
    lock.release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"no checkpoint can be written into {tmp_path / 'file' / 'x'}"):
        Leases().hold(tmp_path / "file" / "x")


def test_what_another_users_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that several users share, its file cannot be written to."""
    opened = os.open

    def of_another_user(path: Any, flags: int, *mode: int) -> int:
        if path == tmp_path / LEASE and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *mode)

    (tmp_path / LEASE).write_text("{}")
    monkeypatch.setattr(os, "open", of_another_user)
    leases = Leases()
    with another_run(tmp_path), monkeypatch.context() as patch:
        patch.setattr(lease, "PATIENCE_SECONDS", 0.3)
        with pytest.raises(StorageError, match="where another run writes"):
            leases.begin({}, [tmp_path])
    (tmp_path / LEASE).write_text("{}")
    leases.hold(tmp_path)
    leases.end()
    assert not (tmp_path / LEASE).exists()
    with pytest.raises(StorageError, match="no checkpoint can be written"):
        leases.begin({}, [tmp_path])


def test_who_has_it_may_not_say_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another_run(tmp_path):
        (tmp_path / LEASE).write_text("garbage")
        monkeypatch.setattr(lease, "SAVE_SECONDS", 0.0)
        with pytest.raises(StorageError, match="it does not say who it is"):
            Leases().begin({}, [tmp_path])


def test_a_process_that_was_forked_does_not_keep_it(tmp_path: Path) -> None:
    """It may outlive the run, whose folder would be nobody's."""
    forked, told = os.pipe()
    if (run := os.fork()) == 0:
        Leases().begin({}, [tmp_path])
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        os.write(told, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(os.read(forked, 100))
    os.waitpid(run, 0)
    leases = Leases()
    try:
        leases.begin({}, [tmp_path])
    finally:
        leases.end()
        os.kill(child, signal.SIGKILL)
        os.close(forked)
        os.close(told)
