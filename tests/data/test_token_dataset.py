"""Checksums of prepared folders: what changed on the disk is not trained on."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import pytest
import torch

from lightning_asyncpp.data import ByteTokenizer, DataError, TextDataModule
from lightning_asyncpp.data import token_dataset as token_dataset_module
from lightning_asyncpp.data.corpus import find_text_files, split_files
from lightning_asyncpp.data.token_dataset import read_metadata, verify_checksums, write_token_dataset
from lightning_asyncpp.storage import durable


@pytest.fixture
def prepared(text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared folder of several chunks."""
    monkeypatch.setattr(token_dataset_module, "CHUNK_BYTES", 8_000)
    monkeypatch.setattr(token_dataset_module, "_GROUP_BYTES", 2_000)
    folder = tmp_path / "cache" / "prepared"
    write_token_dataset(folder, *split_files(find_text_files(text_folder), 0.2), ByteTokenizer())
    return folder


def data_of(folder: Path) -> TextDataModule:
    data = TextDataModule(source=str(folder), context_length=32, batch_size=4)
    data.setup()
    return data


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def as_version_1(folder: Path) -> None:
    content = json.loads((folder / "metadata.json").read_bytes())
    del content["checksums"]
    (folder / "metadata.json").write_text(json.dumps({**content, "format_version": 1}))


def test_every_file_of_the_splits_has_a_checksum(prepared: Path) -> None:
    checksums = read_metadata(prepared).checksums
    files = [path for split in ("train", "val") for path in (prepared / split).iterdir()]
    assert checksums == {f"{path.parent.name}/{path.name}": f"{zlib.crc32(path.read_bytes()):08x}" for path in files}
    assert len([name for name in checksums if name.startswith("train/chunk-")]) > 2
    data_of(prepared)


@pytest.mark.parametrize("pattern", ["train/chunk-*", "val/chunk-*"])
def test_a_flipped_bit_is_reported(prepared: Path, pattern: str) -> None:
    damaged = max(prepared.glob(pattern))
    flip_a_byte(damaged)
    with pytest.raises(DataError) as caught:
        data_of(prepared)
    assert str(caught.value).startswith(f"{damaged} is damaged: its CRC-32 is ")
    assert f"delete {prepared} and have it prepared again" in str(caught.value)


def test_a_missing_file_is_reported(prepared: Path) -> None:
    missing = max(prepared.glob("val/chunk-*"))
    missing.unlink()
    with pytest.raises(DataError, match=rf"{missing.name} is missing, though metadata\.json lists it"):
        verify_checksums(prepared, read_metadata(prepared))


def test_folders_of_version_1_are_read_without_checksums(prepared: Path) -> None:
    expected = list(data_of(prepared).train_dataloader())
    as_version_1(prepared)
    metadata = read_metadata(prepared)
    assert (metadata.format_version, metadata.checksums) == (1, {})
    batches = list(data_of(prepared).train_dataloader())
    assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True))
    flip_a_byte(max(prepared.glob("train/chunk-*")))
    data_of(prepared)


def test_large_files_are_read_in_blocks(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = read_metadata(prepared)
    monkeypatch.setattr(durable, "_READ_BYTES", 100)
    verify_checksums(prepared, metadata)
    wrong = dataclasses.replace(metadata, checksums=dict.fromkeys(metadata.checksums, "00000000"))
    with pytest.raises(DataError, match="and was 00000000"):
        verify_checksums(prepared, wrong)
