"""Measured times of layers on a GPU are those of the device, since the host waits for the work it launched."""

from __future__ import annotations

import torch
from torch import nn

from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition


def test_the_layer_that_computes_longest_is_the_dearest() -> None:
    device = torch.device("cuda")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 256), nn.Linear(256, 256))
    example = Example(lambda: ((torch.ones(4096, 256),), {}), device)
    partition = choose_partition(model, 0, 2, "auto", example)
    assert partition.source == "by measured times", partition.remark
    assert max(partition.costs) == partition.costs[1]
    assert all(p.is_meta for p in model.parameters())
