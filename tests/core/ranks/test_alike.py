"""If scripts end with an error that all ranks raise, only rank 0 shows it in full."""

from __future__ import annotations

import sys

import pytest

from lightning_asyncpp.errors import ConfigurationError, is_alike, raised_alike

REFUSED = ConfigurationError.from_problems(["the first " + "word " * 40, "the second"])


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def shown(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    sys.excepthook(type(error), error, None)
    return capsys.readouterr().err


def test_rank_0_shows_it_and_the_others_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(REFUSED) in shown(raised_alike(REFUSED, 0), capsys)
    line = shown(raised_alike(REFUSED, 1), capsys)
    assert line.startswith("[rank1]: as on rank 0, ConfigurationError: 2 problems: 1. the first word")
    assert line.endswith(" ...\n")
    assert line.count("\n") == 1
    assert "another one" in shown(ValueError("another one"), capsys)
    assert not is_alike(ValueError())
