"""Checkpoints that are read by Lightning's strategies."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_asyncpp.strategy_parts.mixin import DurableCheckpointIO


def test_a_file_of_a_url_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would run what one of http holds."""
    asked = []
    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", lambda self, *arguments: asked.append(arguments))
    files = DurableCheckpointIO()
    for weights_only in (None, True, False):
        files.load_checkpoint("memory://x.ckpt", weights_only=weights_only)
    assert [weights_only for *_, weights_only in asked] == [True, True, False]
