"""Damaged checkpoints are found, and hostile ones run nothing; whatever they hold, the process lives on."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_asyncpp.storage.durable import checksum
from lightning_asyncpp.storage.loading import load, verify
from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.sharded import Shard, index_bytes, read_index
from tests.storage.saves import SAVES, content, version_of
from tests.workers import worker_context

FORMS = ("full", "sharded")


class Reader:
    """Reads checkpoints in a process of its own, which a bad one might end."""

    def __init__(self) -> None:
        context = worker_context()
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_read, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def read(self, path: Path) -> tuple[list[str], str]:
        """What ``verify`` finds, and the class of what ``load`` raises."""
        self.connection.send(path)
        assert self.connection.poll(60), f"reading {path} did not end"
        return self.connection.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)


def _read(connection: Connection) -> None:
    while True:
        path = connection.recv()
        found, raised = None, ""
        try:
            found = load(path)
        except Exception as error:
            raised = type(error).__name__
        with suppress(KeyError, TypeError, AttributeError, RuntimeError):  # other content than these lines know
            torch.cat([tensor.flatten() for tensor in found["state_dict"].values()]).sum()  # only mapped until now
        connection.send((verify(path), raised))


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


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


def flip(file: Path, place: int, bits: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ bits]))


WITH_FIXTURES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("form", FORMS)
@WITH_FIXTURES
@given(data=st.data())
def test_one_flipped_byte(form: str, saved: dict[str, Path], reader: Reader, tmp_path: Path, data: Any) -> None:
    path = copied(saved[form], tmp_path)
    file = data.draw(st.sampled_from(files_in(path)))
    place = data.draw(st.integers(0, file.stat().st_size - 1))
    flip(file, place, data.draw(st.integers(1, 255)))
    problems, raised = reader.read(path)
    assert problems
    assert raised in ("", "StorageError")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_byte(form: str, saved: dict[str, Path], reader: Reader, tmp_path: Path) -> None:
    path = copied(saved[form], tmp_path)
    for file in files_in(path):
        for place in range(file.stat().st_size):
            bits = 1 << place % 8
            flip(file, place, bits)
            problems, raised = reader.read(path)
            assert problems, (file.name, place)
            assert raised in ("", "StorageError"), (file.name, place, raised)
            flip(file, place, bits)
    assert reader.read(path) == ([], "")


@pytest.mark.parametrize("form", FORMS)
@WITH_FIXTURES
@given(data=st.data())
def test_a_file_of_another_length(form: str, saved: dict[str, Path], reader: Reader, tmp_path: Path, data: Any) -> None:
    """Cut, or longer; memory that is mapped beyond the end of a file would end the process."""
    path = copied(saved[form], tmp_path)
    file = data.draw(st.sampled_from(files_in(path)))
    size = file.stat().st_size
    os.truncate(file, data.draw(st.integers(0, 2 * size).filter(lambda length: length != size)))
    problems, raised = reader.read(path)
    assert problems
    assert raised in ("", "StorageError")


def test_a_missing_file(saved: dict[str, Path], tmp_path: Path) -> None:
    for name in [file.name for file in files_in(saved["sharded"])]:
        path = copied(saved["sharded"], tmp_path)
        (path / name).unlink()
        (problem,) = verify(path)
        assert name in problem
        with pytest.raises(StorageError, match=name):
            load(path)


def test_an_index_that_says_something_else(saved: dict[str, Path], tmp_path: Path) -> None:
    """Where nobody else would notice."""
    for old, new in ((b'"num_stages": 2', b'"num_stages": 3'), (b"\n  ", b"\n\t ")):
        path = copied(saved["sharded"], tmp_path)
        text = (path / "index.json").read_bytes()
        assert old in text
        (path / "index.json").write_bytes(text.replace(old, new, 1))
        (problem,) = verify(path)
        assert "index.json is damaged: it differs from its CRC-32" in problem


def test_all_damaged_files_are_named(saved: dict[str, Path], tmp_path: Path) -> None:
    path = copied(saved["sharded"], tmp_path)
    parts = sorted(path.glob("*.safetensors"))
    flip(parts[0], 100, 1)
    os.truncate(parts[1], 50)
    problems = verify(path)
    assert len(problems) == 2
    assert "is damaged: its CRC-32 is" in problems[0]
    assert "has 50 bytes, and had" in problems[1]


def test_a_file_that_has_no_checksum_of_its_own(tmp_path: Path) -> None:
    """As ``torch.save`` writes it: the archive's own are compared; and one of before there were archives is read."""
    path = tmp_path / "x.pt"
    torch.save(content(1), path)
    assert verify(path) == []
    place = path.read_bytes().index(torch.tensor(1.1).numpy().tobytes() * 3)
    flip(path, place, 1)
    (problem,) = verify(path)
    assert "differs from its CRC-32" in problem
    torch.save(content(1), path, _use_new_zipfile_serialization=False)
    assert verify(path) == []
    assert version_of(path) == 1


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
    assert verify(path)
    assert not trap.exists()
    if how != "bare pickle":  # else the test could not fail
        load(path, weights_only=False)
        assert trap.exists()


def test_a_folder_that_holds_code(saved: dict[str, Path], tmp_path: Path) -> None:
    """With sizes and checksums that are right; to trust it changes nothing."""
    path, trap = copied(saved["sharded"], tmp_path), tmp_path / "trap"
    index = read_index(path)
    file = path / index["run"]["file"]
    torch.save({"state_dict": Evil(trap)}, file)
    run = Shard("run", file.name, file.stat().st_size, checksum(file))
    shards = [Shard(**shard) for shard in index["shards"]]
    (path / "index.json").write_bytes(index_bytes(run, shards, index["about"]))
    for weights_only in (None, True, False):
        with pytest.raises(StorageError, match="without running code"):
            load(path, weights_only)
    assert verify(path)
    assert not trap.exists()
