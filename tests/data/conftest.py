from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.models import write_texts


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text")
