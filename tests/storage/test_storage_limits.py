"""A file that asks for more than its size accounts for is refused with a sentence: no MemoryError, no hang."""

from __future__ import annotations

import json
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.cli import main
from lightning_asyncpp.storage.loading import load, verify
from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.whole import save_file

HUGE = 10**15


class Reduced:
    """Is pickled as a call of something that files of torch may call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def endless() -> Any:
    outer: list[Any] = []
    outer.append({"again": outer})
    return outer


def repeated() -> Any:
    """2**60 values for whoever walks over them."""
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    return value


def expanded() -> Any:
    return torch.zeros(1).expand(HUGE)


def many_expanded() -> Any:
    return [torch.zeros(1).expand(10**7 + number) for number in range(100)]


def beyond_its_storage() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = torch.zeros(4).storage()
    return Reduced(torch._utils._rebuild_tensor_v2, storage, 0, (HUGE,), (1,), False, OrderedDict())


def bytes_of_a_number() -> Any:
    return Reduced(bytearray, HUGE)


def known_before() -> Any:
    number = 5 * 10**8
    return [number, number, Reduced(bytearray, number)]


def tensor_of_a_number() -> Any:
    return Reduced(torch.Tensor, HUGE)


CONTENTS = {
    endless: "holds itself, or has more than 100 levels",
    repeated: "values, most of them the same ones again", expanded: "its tensors and texts would take 40000",
    many_expanded: "its tensors and texts would take 400",
    beyond_its_storage: "is damaged or no checkpoint", bytes_of_a_number: "bytes that are made of a number",
    known_before: "bytes that are made of a number",
    tensor_of_a_number: "more memory than this machine gives",
}  # fmt: skip


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(StorageError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert verify(path) == [str(caught.value)]


@pytest.mark.parametrize(("value", "message"), CONTENTS.items(), ids=[value.__name__ for value in CONTENTS])
@pytest.mark.parametrize("form", ["sealed", "plain", "of before archives"])
def test_content(value: Callable[[], Any], message: str, form: str, tmp_path: Path) -> None:
    path, content = tmp_path / "x.ckpt", {"state_dict": {}, "x": value()}
    if form == "sealed":
        save_file(content, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "plain")
    if value is beyond_its_storage and form == "of before archives":
        message = "more memory than this machine gives"
    check_refused(path, message)


def test_many_levels(tmp_path: Path) -> None:
    """More than Python's pickler writes, which calls itself for each; an unpickler does not."""
    path = tmp_path / "x.ckpt"
    torch.save([1], path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    levels = 5000
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            lists = b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."
            archive.writestr(name, lists if name.endswith("data.pkl") else data)
    check_refused(path, "holds itself, or has more than 100 levels")


def test_entries_that_inflate(tmp_path: Path) -> None:
    """As a re-packed archive may have them; torch would map what is compressed as if it were not."""
    path, packed = tmp_path / "x.ckpt", tmp_path / "y.ckpt"
    torch.save({"x": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    assert packed.stat().st_size < 10**5
    check_refused(packed, "is compressed")


def test_entries_that_lie_over_each_other(tmp_path: Path) -> None:
    """The list of what an archive holds names the same bytes many times."""
    path = tmp_path / "x.ckpt"
    torch.save({"x": torch.zeros(10**5)}, path)
    data = path.read_bytes()
    end = data.rindex(b"PK\5\6")
    entries, _, size, start = struct.unpack("<HHII", data[end + 8 : end + 20])
    listed = data[start : start + size]
    changed = data[:start] + listed * 50
    changed += (
        data[end : end + 8] + struct.pack("<HHII", entries * 50, entries * 50, size * 50, start) + data[end + 20 :]
    )
    path.write_bytes(changed)
    check_refused(path, "bytes, and the file")


def test_a_header_of_safetensors(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 16]}}).encode()
    for length in (len(header), 2**60):
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", length) + header + bytes(16))
        check_refused(path, "is damaged or no checkpoint")


def test_what_honest_files_hold_is_read(tmp_path: Path) -> None:
    """Parts of one tensor, a tensor and a list at many places, a small tensor expanded, a long list, an empty one."""
    table, shared = torch.arange(1000.0), [1, 2, 3]
    content = {
        "parts": [table[i : i + 500] for i in range(100)], "names": {str(i): table for i in range(10_000)},
        "lists": [shared] * 10_000, "mask": torch.ones(1).expand(1000, 1000), "order": list(range(200_000)),
        "none": torch.empty(0, 10**9), "sparse": torch.eye(3).to_sparse(), "text": "x" * 10**6, "set": {1, 2},
        "bytes": [bytearray(b"abc"), b"d", bytearray(), 7],
    }  # fmt: skip
    save_file(content, tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt") == []
    found = load(tmp_path / "x.ckpt")
    assert found["order"][-1] == 199_999
    assert found["mask"].sum() == 10**6


@pytest.mark.parametrize("value", [endless, expanded, repeated])
def test_every_command_refuses_it(value: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "x.ckpt")
    save_file({"state_dict": {"model.embedding.token.weight": value()}, "hyper_parameters": {"x": value()}}, Path(path))
    commands: list[list[str]] = [
        ["checkpoint", "info", path], ["checkpoint", "verify", path], ["evaluate", path],
        ["checkpoint", "convert", path, str(tmp_path / "y.ckpt"), "--to", "sharded"],
        ["export", path, "--output", str(tmp_path / "hf")], ["generate", path, "--prompt", "a"],
        ["fit", "--model", "lightning_asyncpp.GPTModule", "--model.config.vocab_size=256", "--ckpt_path", path,
         "--data", "lightning_asyncpp.data.TextDataModule"],
    ]  # fmt: skip
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main(command)
        printed = "".join(capsys.readouterr())
        assert end.value.code == (1 if "verify" in command else 2), printed
        assert "is damaged or no checkpoint: " in printed, command
        assert "Traceback" not in printed
