"""Error Feedback's memory: one persistent buffer, and no temporary of model size when the weights are provided."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_asyncpp.optim import ErrorFeedback

ELEMENTS = 2**20
MODEL_BYTES = 4 * ELEMENTS


def allocated(function, path):
    """Return (peak, what is left) of the bytes that ``function`` allocated, from the allocator's own events.

    Memory of before is not counted when it is freed meanwhile, as the garbage of other tests is.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    peak, sizes = 0, {}  # the sizes by address
    for event in sorted(events, key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            sizes[address] = size
        else:
            sizes.pop(address, None)
        peak = max(peak, sum(sizes.values()))
    return peak, sum(sizes.values())


@pytest.mark.parametrize("provided", [True, False])
@pytest.mark.parametrize("buffer_dtype", [None, "bfloat16"])
def test_peak(provided, buffer_dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_asyncpp.optim.error_feedback.CPU_CHUNK_ELEMENTS", ELEMENTS // 64)
    p = nn.Parameter(torch.ones(1024, ELEMENTS // 1024))
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    optimizer = ErrorFeedback([p], partial(torch.optim.SGD, lr=0.1, foreach=False), buffer_dtype=buffer_dtype)

    def step():
        if provided:
            before.copy_(p.detach())
            with optimizer.weights_before({p: before}):
                optimizer.step()
        else:
            optimizer.step()

    _, kept = allocated(step, tmp_path / "first.json")
    peak, kept_later = allocated(step, tmp_path / "second.json")
    assert kept == pytest.approx(MODEL_BYTES / (2 if buffer_dtype else 1), rel=0.01)  # the one buffer
    assert kept_later == pytest.approx(0, abs=0.01 * MODEL_BYTES)
    if provided:
        assert peak < 0.1 * MODEL_BYTES
    else:
        assert peak == pytest.approx(MODEL_BYTES, rel=0.1)  # the snapshot
