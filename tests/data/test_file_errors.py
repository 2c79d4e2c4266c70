"""What the file system refuses: every time a DataError that names the argument, and what would work."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.data.corpus import find_text_files
from lightning_asyncpp.data.errors import file_errors
from tests.data.test_text_data_module import module, prepared_folder, ready


def refusing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, refused: Path, number: int = errno.EACCES) -> None:
    """Let a function of the file system fail for a path: the user of these tests may be root, who may do everything."""
    function: Callable[..., Any] = getattr(owner, name)

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if Path(path) == refused:
            raise OSError(number, os.strerror(number), str(refused))
        return function(path, *arguments, **options)

    monkeypatch.setattr(owner, name, refuse)


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def nobody(path: Any) -> Any:
        return path

    monkeypatch.setattr(os.path, "expanduser", nobody)  # as where the password file does not know the user


def test_no_home_folder(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = len(ready(text_folder).train_dataloader())
    prepared = prepared_folder(text_folder)
    without_home(monkeypatch)
    with pytest.raises(DataError) as caught:
        TextDataModule(str(text_folder))
    assert "cache_dir=None cannot be found: there is no home folder; set HOME to a folder" in str(caught.value)
    for name, arguments in (("source", {"source": "~/text"}), ("cache_dir", {"cache_dir": "~/cache"})):
        with pytest.raises(DataError, match=f"^{name}='~/.*there is no home folder"):
            TextDataModule(**arguments)
    data = TextDataModule(str(prepared), context_length=32, batch_size=4)  # where nothing is kept none is missed
    data.setup()
    assert len(data.train_dataloader()) == expected


def test_a_cache_that_cannot_be_written(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = text_folder.parent / "cache"
    with monkeypatch.context() as patched:
        refusing(patched, pathlib.Path, "mkdir", cache, errno.EROFS)
        with pytest.raises(DataError) as caught:
            module(text_folder).prepare_data()
    message = str(caught.value)
    assert message.startswith(f"cache_dir={str(cache)!r} cannot be written (Read-only file system: {cache})")
    assert "name another cache_dir" in message
    ready(text_folder)
    refusing(monkeypatch, pathlib.Path, "mkdir", cache, errno.EROFS)
    refusing(monkeypatch, os, "mkdir", cache, errno.EROFS)
    assert len(ready(text_folder).train_dataloader()) > 0  # it has been prepared: nothing is written


def test_a_stream_whose_chunks_cannot_be_kept(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(text_folder)
    data = ready(text_folder, source=f"local:{prepared_folder(text_folder) / 'train'}", vocab_size=256)
    refusing(monkeypatch, pathlib.Path, "mkdir", text_folder.parent / "cache" / "streamed" / "rank-0")
    with pytest.raises(DataError, match=r"cache_dir=.*cannot be written \(Permission denied.*another cache_dir"):
        data.train_dataloader()


def test_a_file_that_cannot_be_read(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, pathlib.Path, "read_bytes", text_folder / "3.txt")
    with pytest.raises(DataError) as caught:
        module(text_folder).prepare_data()
    assert str(caught.value).startswith(f"{text_folder / '3.txt'} cannot be read (Permission denied")
    assert "chmod), or give `patterns` that leave it out" in str(caught.value)
    assert module(text_folder, patterns=["[4-9].txt"]).prepare_data() is None


def test_folders_that_cannot_be_listed(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.glob` leaves them out in silence: the corpus would be another one."""
    refused = text_folder / "private"
    refused.mkdir()
    (refused / "a.txt").write_text("text")
    refusing(monkeypatch, os, "scandir", refused)
    with pytest.raises(DataError) as caught:
        find_text_files(text_folder)
    message = str(caught.value)
    assert message.startswith(
        f"source={str(text_folder)!r} cannot be read (Permission denied: {refused}); let this user"
    )
    assert "or give `patterns` that leave it out" in message
    assert len(find_text_files(text_folder, ["*.txt"])) == len(find_text_files(text_folder, ["[!p]*", "x/**/*"])) == 40
    for pattern in ("private/*.txt", "p*/**/*.txt"):
        with pytest.raises(DataError, match="cannot be read"):
            find_text_files(text_folder, [pattern])


def test_the_source_itself_cannot_be_listed(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, os, "scandir", text_folder)
    with pytest.raises(DataError, match=r"source=.*cannot be read \(Permission denied"):
        find_text_files(text_folder)


def test_a_source_behind_a_closed_door(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, os, "stat", text_folder / "metadata.json")
    refusing(monkeypatch, pathlib.Path, "exists", text_folder / "metadata.json")
    with pytest.raises(DataError) as caught:
        module(text_folder)
    assert str(caught.value).startswith(f"source={str(text_folder)!r} cannot be read (Permission denied")


def test_names_that_are_not_utf_8(text_folder: Path) -> None:
    strange = os.fsencode(text_folder) + b"/gr\xf6\xdfe.txt"
    try:
        with open(strange, "w") as file:
            file.write("text")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(DataError) as caught:
        module(text_folder).prepare_data()
    message = str(caught.value)
    assert message.startswith(r"gr\udcf6\udcdfe.txt in ")
    assert "is not UTF-8" in message
    assert "rename it, or give `patterns` that leave it out" in message
    message.encode()
    assert len(find_text_files(text_folder, ["[0-9]*.txt"])) == 40


def test_a_folder_whose_name_is_not_utf_8(text_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_asyncpp")
    strange = os.fsdecode(os.fsencode(text_folder.parent) + b"/gr\xf6\xdfe")
    try:
        text_folder.rename(strange)
    except OSError:
        pytest.skip("this file system has no such names")
    data = ready(Path(strange), cache_dir=str(text_folder.parent / "cache"))
    assert len(data.train_dataloader()) > 0
    assert r"gr\udcf6\udcdfe" in caplog.text
    caplog.text.encode()  # whoever reads the log may be strict
    with pytest.raises(DataError) as caught:  # libraries that are not Python's take no such path
        module(Path(strange), cache_dir=f"{strange}-cache", tokenizer="bpe", vocab_size=300).prepare_data()
    assert "is not UTF-8; name another cache_dir" in str(caught.value)


def test_errors_of_the_network_are_not_the_file_systems() -> None:
    for error in (OSError("HTTP 500"), ConnectionResetError(errno.ECONNRESET, "reset"), RuntimeError("another")):
        with pytest.raises(type(error)), file_errors("source='s3://a'", "read", "name another source"):
            raise error
