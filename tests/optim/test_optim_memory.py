"""Error Feedback's memory: one persistent buffer, and no temporary of model size when the weights are provided."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import ErrorFeedback
from tests.helpers.alone import allocated

ELEMENTS = 2**20
MODEL_BYTES = 4 * ELEMENTS


@pytest.mark.parametrize(
    ("way", "buffer_dtype"),
    [("provided", None), ("provided", "bfloat16"), ("a snapshot", None), ("a snapshot", "bfloat16"), ("masters", None)],
)
def test_peak(way, buffer_dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_asyncpp.optim.error_feedback.CPU_CHUNK_ELEMENTS", ELEMENTS // 64)
    p = nn.Parameter(torch.ones(1024, ELEMENTS // 1024))
    p.grad = torch.ones_like(p)
    before, compute = p.detach().clone(), p.detach().to(torch.bfloat16)
    optimizer = ErrorFeedback([p], partial(torch.optim.SGD, lr=0.1, foreach=False), buffer_dtype=buffer_dtype)
    given = {
        "provided": lambda: optimizer.weights_before({p: before}),
        "a snapshot": nullcontext,
        "masters": lambda: optimizer.compute_weights({p: compute}),
    }

    def step():
        before.copy_(p.detach())
        with given[way]():
            optimizer.step()

    _, kept = allocated(step, tmp_path / "first.json")
    peak, kept_later = allocated(step, tmp_path / "second.json")
    assert kept == pytest.approx(MODEL_BYTES / (2 if buffer_dtype else 1), rel=0.01)  # the one buffer
    assert kept_later == pytest.approx(0, abs=0.01 * MODEL_BYTES)
    if way == "a snapshot":
        assert peak == pytest.approx(MODEL_BYTES, rel=0.1)
    else:
        assert peak < 0.1 * MODEL_BYTES
