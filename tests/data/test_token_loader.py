"""litdata's order of sequences: the same on all file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_text_data_module import ready


def test_as_on_other_file_systems(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from litdata.streaming import dataset as litdatas
    from litdata.streaming.posix_fast import PosixFastProfile

    monkeypatch.setattr(litdatas, "detect_posix_fast", lambda *_, **__: PosixFastProfile(kind="lustre"))
    assert PosixFastProfile(kind="lustre").window_shuffle
    assert not ready(text_folder).train_dataloader().dataset.posix_fast.window_shuffle
