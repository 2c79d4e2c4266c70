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
    assert [file.name for file in find_text_files(copy)] == names
    assert names != sorted(names)


def test_max_bytes_takes_from_both_splits(folder: Path) -> None:
    files = find_text_files(folder, max_bytes=1000)
    assert 900 < sum(file.size for file in files) <= 1000
    train, validation = split(files, 0.2)
    assert len(train) > len(validation) > 0


def test_two_files_give_one_each(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    for fraction in (1e-9, 1 - 1e-9):
        train, validation = split(find_text_files(tmp_path), fraction)
        assert len(train) == len(validation) == 1
    train, validation = split(find_text_files(tmp_path), 0.0)
    assert (len(train), len(validation)) == (2, 0)


def test_hidden_files_and_other_names_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/notes.txt", ".hidden.txt", "image.png", "kept.md"):
        (tmp_path / name).write_text("text")
    assert [file.name for file in find_text_files(tmp_path)] == ["kept.md"]
    assert [file.name for file in find_text_files(tmp_path, ["*.png"])] == ["image.png"]


def test_standard_library() -> None:
    files = find_text_files("stdlib", max_bytes=300_000)
    assert all(file.name.endswith(".py") and "site-packages" not in file.name for file in files)
    assert all(file.read() is not None for file in files)


def test_installed_packages() -> None:
    files = find_text_files("packages", ["torch/nn/*.py", "torch/nn/*.pyi"])
    assert "torch/nn/functional.py" in [file.name for file in files]
    assert all(file.name.startswith("torch/nn/") and file.name.endswith(".py") for file in files)
    with pytest.raises(DataError, match="holds no text file that matches"):
        find_text_files("packages", ["no_such_package/**/*.py"])


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    errors = {}
    for file in find_text_files(tmp_path):
        with pytest.raises(DataError) as caught:
            file.read()
        errors[file.name] = str(caught.value)
    assert "latin.txt is not UTF-8 text (byte 2" in errors["latin.txt"]
    assert "iconv" in errors["latin.txt"]


def test_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text file"):
        find_text_files(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        find_text_files(tmp_path / "absent")
    (tmp_path / "only.txt").write_text("text")
    with pytest.raises(DataError, match=r"only\.txt cannot be divided"):
        split(find_text_files(tmp_path), 0.1)
    with pytest.raises(DataError, match="within max_bytes=2"):
        find_text_files(tmp_path, max_bytes=2)
