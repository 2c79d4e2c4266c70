"""A span on a GPU lasts as long as the GPU works, although the host launches all its work at once."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Trace, Wait, clock_of

DEVICE = torch.device("cuda", 0)


def test_work_and_waits_are_those_of_the_gpu() -> None:
    x = torch.randn(4096, 4096, device=DEVICE)

    def work() -> None:
        for _ in range(20):
            torch.mm(x, x)

    work()
    torch.cuda.synchronize()
    trace = Trace(clock_of(DEVICE))
    reader = trace.read()
    began = time.perf_counter()
    with trace.span(Kind.FORWARD, 0):
        work()
    with trace.span(Wait.GRADIENT, 0):
        pass
    launched = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    with trace.span(Wait.GRADIENT, 1):
        time.sleep(0.05)
    forward, hidden, waited = reader.take(seconds=1.0)
    assert launched - began < forward.end - forward.start == pytest.approx(ended - began, rel=0.2)
    assert began - 1e-3 < forward.start < forward.end < ended + 1e-3
    assert hidden.end - hidden.start < 1e-3
    assert waited.end - waited.start == pytest.approx(0.05, abs=5e-3)
