"""What is said where a package of an extra is not installed: one wording, with what to install."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_asyncpp.dependencies import EXTRAS, needed, optional_package

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("peft", 'lora needs `peft`, not installed here: pip install "lightning-asyncpp[lora]"'),
        ("frobnicate.torch", "lora needs `frobnicate`, not installed here: pip install frobnicate"),
    ],
    ids=["of an extra", "by its own name"],
)
def test_a_missing_package(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as caught:
        optional_package(name, "lora")
    assert str(caught.value) == said


def test_a_package_that_is_there_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To install it again would not help."""
    (tmp_path / "half_a_package.py").write_text("import frobnicate")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^No module named 'frobnicate'$"):
        optional_package("half_a_package", "lora")


def test_what_is_there_is_returned() -> None:
    assert optional_package("json.decoder", "this").JSONDecoder


def test_several_at_once() -> None:
    said = needed("this", ["peft", "pyarrow", "frobnicate"])
    assert said.endswith('pip install "lightning-asyncpp[lora,prepare]" frobnicate')


def test_the_extras_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package, extra in EXTRAS.items():
        (brings,) = re.findall(rf"^{extra} = (\[.*\])$", text, re.MULTILINE)
        assert f'"{package}>=' in brings
