"""litdata's order of sequences: the same on all file systems and in all releases, or an error that says so."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import litdata
import pytest

from lightning_asyncpp.data import token_loader as token_loader_module
from tests.data.test_text_data_module import ready

HAS_PROFILES, HAS_WINDOWS = token_loader_module._HAS_PROFILES, token_loader_module._HAS_WINDOWS


def test_the_installed_release_is_told(text_folder: Path) -> None:
    dataset = ready(text_folder).train_dataloader().dataset
    assert hasattr(dataset, "posix_fast") == bool(HAS_PROFILES)
    assert ("item_shuffle_window" in inspect.signature(type(dataset)).parameters) == bool(HAS_WINDOWS)
    if HAS_PROFILES:
        assert not dataset.posix_fast.window_shuffle
    if HAS_WINDOWS:
        assert dataset.item_shuffle_window == 0


@pytest.mark.skipif(not HAS_PROFILES, reason="this litdata does not look at the file system")
def test_as_on_other_file_systems(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from litdata.streaming import dataset as litdatas
    from litdata.streaming.posix_fast import PosixFastProfile

    monkeypatch.setattr(litdatas, "detect_posix_fast", lambda *_, **__: PosixFastProfile(kind="lustre"))
    assert PosixFastProfile(kind="lustre").window_shuffle
    assert not ready(text_folder).train_dataloader().dataset.posix_fast.window_shuffle


class Without(litdata.StreamingDataset):
    """litdata's dataset of a release that has lost both, or does not have them yet."""

    def __init__(self, input_dir: str, cache_dir: Any, item_loader: Any, shuffle: bool, drop_last: bool, seed: int,
                 transform: Any) -> None:  # fmt: skip
        super().__init__(input_dir, cache_dir, item_loader, shuffle, drop_last, seed, transform=transform)
        vars(self).pop("posix_fast", None)

    def get_len(self, num_workers: int, batch_size: int) -> int:
        return batch_size


@dataclass(frozen=True)
class Renamed:
    """A profile that no longer goes by its kind."""

    file_system: str
    window_shuffle: bool = True


class WithRenamed(litdata.StreamingDataset):
    """litdata's dataset of a release in which the profile is described otherwise."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        vars(self)["posix_fast"] = Renamed("lustre")


@pytest.mark.parametrize(
    ("since", "name"),
    [
        ("_HAS_WINDOWS", r"StreamingDataset\(item_shuffle_window=\.\.\.\)"),
        ("_HAS_PROFILES", r"StreamingDataset\.posix_fast`"),
    ],
)
def test_a_release_without_what_is_expected_of_it(
    text_folder: Path, since: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litdata, "StreamingDataset", Without)
    for each in ("_HAS_WINDOWS", "_HAS_PROFILES"):
        monkeypatch.setattr(token_loader_module, each, each == since)
    with pytest.raises(RuntimeError, match=rf"litdata [\d.]+ has no `{name}.*pip install litdata==0\.2\.76"):
        ready(text_folder).train_dataloader()
    monkeypatch.setattr(token_loader_module, since, False)  # an older one is not expected to have them
    ready(text_folder).train_dataloader()


def test_a_release_whose_profiles_have_no_kind(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litdata, "StreamingDataset", WithRenamed)
    monkeypatch.setattr(token_loader_module, "_HAS_PROFILES", True)
    monkeypatch.setattr(token_loader_module, "_HAS_WINDOWS", False)
    with pytest.raises(RuntimeError, match=r"has no `StreamingDataset\.posix_fast\.kind"):
        ready(text_folder).train_dataloader()
