"""The memory of stages on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.trainer.callbacks import pipeline_monitor as memory


def test_memory_is_the_largest_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(
        mesh=SimpleNamespace(stage=1, num_stages=2), watch=SimpleNamespace(collective=nullcontext)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000_000_000)
    monkeypatch.setattr(memory, "exchange", lambda mesh, own: [own, "0 1000000000", "1 2000000000", "0 1500000000"])
    peaks = memory.peak_memory(session, torch.device("cuda:0"))
    assert peaks == {"peak_memory_stage_0": 1.5, "peak_memory_stage_1": 3.0}
