from __future__ import annotations

from pathlib import Path

import pytest

from lightning_asyncpp.data import DataError
from lightning_asyncpp.data.corpus import find_text_files, split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(200):
        path = tmp_path / f"part{index % 7}" / f"{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"document {index}\n")
    return tmp_path


def test_split_is_by_file_and_stable(folder: Path) -> None:
    files = find_text_files(folder)
    train, validation = split(files, 0.2)
    assert not set(train) & set(validation)
    assert set(train) | set(validation) == set(files)
    assert 20 <= len(validation) <= 60
    (folder / "new.txt").write_text("one more")
    grown_train, grown_validation = split(find_text_files(folder), 0.2)
    assert set(train) <= set(grown_train)
    assert set(validation) <= set(grown_validation)


def test_order_depends_on_names_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    names = [file.name for file in find_text_files(folder)]
    for name in reversed(names):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("other text")
    assert [file.name for file in find_text_files(copy)] == names != sorted(names)


def test_max_bytes_takes_from_both_splits(folder: Path) -> None:
    files = find_text_files(folder, max_bytes=1000)
    assert 900 < sum(file.size for file in files) <= 1000
    train, validation = split(files, 0.2)
    assert len(train) > len(validation) > 0


def test_files_that_are_left_out_or_no_text(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/notes.txt", ".hidden.txt", "image.png", "kept.md"):
        (tmp_path / name).write_bytes("größe".encode("latin-1"))
    (file,) = find_text_files(tmp_path)
    with pytest.raises(DataError, match=r"kept\.md is not UTF-8 text \(byte 2"):
        file.read()


@pytest.mark.parametrize("source", ["stdlib", "packages"])
def test_code_of_this_machine(source: str) -> None:
    files = find_text_files(source, ["json/*.py", "torch/nn/*.py"])
    place = {"stdlib": "json/", "packages": "torch/nn/"}[source]
    assert all(file.name.startswith(place) and file.read() for file in files)
    assert files
