"""Fixtures of the tests of ablations."""

from __future__ import annotations

import sys

import pytest

from lightning_asyncpp.tools.ablation import ablate
from lightning_asyncpp.tools.ablation.report import __main__ as ablate_report
from lightning_asyncpp.tools.ablation.run import training_runner as ablate_run
from tests.tools.ablation.pretending import PRETENDER


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings that take their result from the folder's name."""
    pretender = [sys.executable, "-S", "-c", PRETENDER]
    monkeypatch.setattr(ablate_run, "worker_command", lambda folder: [*pretender, str(folder)])
    monkeypatch.setattr(ablate_run, "_POLL_SECONDS", 0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what is tested elsewhere."""
    monkeypatch.setattr(ablate, "find_problems", lambda recipe: [])
    monkeypatch.setattr(ablate_report, "write_report", lambda folder: None)
