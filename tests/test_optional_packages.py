"""If a package of an extra is missing, the error says what to install."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_asyncpp.dependencies import EXTRAS, optional_package


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'^lora needs `peft`, not .*: pip install "lightning-asyncpp\[lora\]"$'):
        optional_package("peft", "lora")


def test_the_extras_are_those_of_the_package() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for package, extra in EXTRAS.items():
        (brings,) = re.findall(rf"(?m)^{extra} = (\[.*\])$", text)
        assert f'"{package}>=' in brings
