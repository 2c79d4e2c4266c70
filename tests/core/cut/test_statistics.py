"""The statistics of all layers are in one vector, with the same layout on all stages."""

from __future__ import annotations

import torch
from torch import nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.cut.whole_model import StatisticsLayout
from tests.helpers.cases import DIM, Routed


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), Routed(), nn.Linear(DIM, DIM), nn.Sequential(Routed(), nn.Linear(DIM, 1)))


def test_a_stage_fills_its_own_places() -> None:
    stage = cut(model(), 1, 2, 0, torch.device("cpu"))
    (layer,) = stage.counting_layers.values()
    vector = stage.whole.statistics.pack({layer: torch.arange(4.0)}, stage.counting_layers)
    assert vector.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]


def test_metrics_are_reduced_over_layers_as_their_class_says() -> None:
    layout = StatisticsLayout(pipeline_units(model()))
    totals = torch.tensor([2, 2, 2, 6, 6, 0, 0, 6], dtype=torch.float64)
    assert layout.metrics(totals) == {"samples": 12.0, "busiest": 3.0}
