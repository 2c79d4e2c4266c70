"""The table of stages: layers, parameters, and what stages cost, in the unit that the model names."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from torch import nn

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.trainer.callbacks.terminal import StageSummary, show_stages, stage_table


def table_of(model: nn.Module, replicas: int = 1, asked: Any = "auto") -> tuple[list[list[str]], str]:
    """Cells of the table over two stages, and the line about ranks below it."""
    partition = choose_partition(model, 0, 2, asked)
    whole = WholeModel.of(pipeline_units(model), partition.counts)
    session: Any = SimpleNamespace(whole_model=whole, partition=partition, mesh=Mesh(2, replicas, 0))
    lines = stage_table(session, model).splitlines()[1:]
    (ranks,) = (line for line in lines if line.startswith("A rank is"))
    return [re.split(r"  +", line.strip()) for line in lines if line != ranks and not line.startswith("-")], ranks


def test_a_gpt_is_told_in_operations_per_token() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=4, dim=32, num_heads=2))
    (titles, first, second, total), last = table_of(model, replicas=2)
    assert titles == ["stage", "ranks", "layers", "names", "parameters", "FLOPs/token", "of cost"]
    assert first[:4] == ["0", "1, 3", "3", "embedding to blocks.1"]
    assert second[:4] == ["1", "0, 2", "3", "blocks.2 to head"]
    assert total[:2] == ["all", "6"]
    shares = [float(row[-1].rstrip(" %")) for row in (first, second, total)]
    assert shares[0] + shares[1] == pytest.approx(shares[2], abs=0.11) == 100.0
    costs = model.pipeline_costs()
    assert shares[0] == pytest.approx(100 * sum(costs[:3]) / sum(costs), abs=0.05)
    assert "Rank 0 runs stage 1 of the first replica, which computes the loss" in last
    assert "Batches enter at stage 0, on rank 1." in last


def test_without_costs_there_are_parameters_alone() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 20, bias=False))
    (titles, *rows, frozen), _ = table_of(model, asked="uniform")
    assert titles == ["stage", "ranks", "layers", "names", "parameters"]
    assert [row[-1].strip() for row in rows] == ["100", "200", "300"]
    assert frozen == ["100 of the parameters are frozen."]


def test_it_takes_the_place_of_the_default_summary_alone() -> None:
    other = object()
    for given, left in (
        ([other, RichModelSummary()], [other, StageSummary]),
        ([ModelSummary(max_depth=2), other], [StageSummary, other]),
        ([other], [other]),
    ):
        trainer: Any = SimpleNamespace(callbacks=given)
        show_stages(trainer)
        show_stages(trainer)
        assert [StageSummary if isinstance(c, StageSummary) else c for c in trainer.callbacks] == left
