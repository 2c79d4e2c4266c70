"""Spans, and measured times of layers, last as long as the GPU works, although the host launches all work at once."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition
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


def test_the_layer_that_computes_longest_is_the_dearest() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 256), nn.Linear(256, 256))
    example = Example(lambda: ((torch.ones(4096, 256),), {}), DEVICE)
    partition = choose_partition(model, 0, 2, "auto", example)
    assert partition.source == "by measured times", partition.remark
    assert max(partition.costs) == partition.costs[1]
    assert all(p.is_meta for p in model.parameters())
