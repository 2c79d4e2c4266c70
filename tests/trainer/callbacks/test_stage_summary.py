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

CONFIG = GPTConfig(vocab_size=64, context_length=16, num_layers=4, dim=32, num_heads=2)


def table_of(model: nn.Module, stages: int, replicas: int = 1, asked: Any = "auto") -> list[list[str]]:
    """Cells of the table, without its lines."""
    partition = choose_partition(model, 0, stages, asked)
    whole = WholeModel.of(pipeline_units(model), partition.counts)
    session: Any = SimpleNamespace(whole_model=whole, partition=partition, mesh=Mesh(stages, replicas, 0))
    lines = stage_table(session, model).splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[1:] if not line.startswith(("-", "A rank is"))]


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        (1, "Rank 0 holds stage 2, which computes the loss; it writes the logs."
         " Batches enter at stage 0, on rank 2."),
        (2, "Rank 0 holds stage 2 of the first replica, which computes the loss; it writes the"
         " logs. Batches enter at stage 0, on rank 2. The ranks of a row hold the same stage, one per replica."),
    ],
    ids=["one replica", "two replicas"],
)  # fmt: skip
def test_a_line_says_how_ranks_and_stages_belong_together(replicas: int, said: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    whole = WholeModel.of(pipeline_units(model), (1, 1, 1))
    mesh = Mesh(3, replicas, 0)
    session: Any = SimpleNamespace(whole_model=whole, partition=None, mesh=mesh)
    *_, last = stage_table(session, model).splitlines()
    assert last == f"A rank is a process. {said}"


def test_a_gpt_is_told_in_operations_per_token() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    titles, first, second, total = table_of(model, 2, replicas=2)
    assert titles == ["stage", "ranks", "layers", "names", "parameters", "FLOPs/token", "of cost"]
    assert first[:4] == ["0", "1, 3", "3", "embedding to blocks.1"]
    assert second[:4] == ["1", "0, 2", "3", "blocks.2 to head"]
    assert total[:2] == ["all", "6"]
    shares = [float(row[-1].rstrip(" %")) for row in (first, second, total)]
    assert shares[0] + shares[1] == pytest.approx(shares[2], abs=0.11) == 100.0
    costs = model.pipeline_costs()
    assert shares[0] == pytest.approx(100 * sum(costs[:3]) / sum(costs), abs=0.05)


def test_without_costs_there_are_parameters_alone() -> None:
    layers = [nn.Linear(10, 10, bias=False), nn.Linear(10, 20, bias=False)]
    titles, first, second, total = table_of(nn.Sequential(*layers), 2, asked="uniform")
    assert titles == ["stage", "ranks", "layers", "names", "parameters"]
    assert [row[-1].strip() for row in (first, second, total)] == ["100", "200", "300"]


def test_what_is_frozen_is_said() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 20, bias=False))
    *_, last = table_of(model, 2, asked=[1, 1])
    assert "".join(last) == "100 of the parameters are frozen."


def test_it_takes_the_place_of_the_default_summary_alone() -> None:
    other = object()
    for given, left in (
        ([other, RichModelSummary()], [other, StageSummary]),
        ([ModelSummary(), other], [StageSummary, other]),
        ([ModelSummary(max_depth=2), other], [StageSummary, other]),
        ([other], [other]),
    ):
        trainer: Any = SimpleNamespace(callbacks=given)
        show_stages(trainer)
        show_stages(trainer)
        assert [StageSummary if isinstance(c, StageSummary) else c for c in trainer.callbacks] == left
