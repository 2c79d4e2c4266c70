"""Rank 0 gathers the state of all stages unchanged, however tensors are combined into messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core import checkpoint as gathering
from lightning_asyncpp.core.checkpoint import gather
from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.helpers.failing import run_ranks


def part_of(stage: int) -> dict[str, Any]:
    """Return large and small tensors of several dtypes, one of them twice, one without elements, and a string."""
    generator = torch.Generator().manual_seed(stage)
    large = [torch.randn(size, generator=generator) for size in (300_000, 90, 200_001, 150_000)]
    small = torch.randn(3, 5, generator=generator).t()
    more = (
        small.bfloat16(),
        torch.tensor(stage),
        torch.arange(7) > 3,
        torch.empty(0, 4),
        small.double().expand(2, 5, 3),
    )
    return {"large": large, "small": small, "again": small, "more": more, "name": f"stage {stage}"}


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [(key, *flat(child)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [flat(child) for child in tree]
    return [(tree.dtype, tree.tolist())] if isinstance(tree, Tensor) else [tree]


def gathered(mesh: Mesh, small_bytes: int) -> list[Any]:
    gathering._SMALL_BYTES = small_bytes
    found = gather(mesh, part_of(mesh.stage), [mesh.rank_of(stage, replica=0) for stage in range(3)])
    assert all(part["small"] is part["again"] or part["small"].data_ptr() == part["again"].data_ptr() for part in found)
    return [flat(part) == flat(part_of(stage)) for stage, part in enumerate(found)]


@pytest.mark.parametrize("small_bytes", [gathering._SMALL_BYTES, 0])
def test_every_stage_arrives(small_bytes: int) -> None:
    outcomes = run_ranks(gathered, 3, small_bytes)
    assert [outcome.value for outcome in outcomes] == [[True] * 3, [], []], outcomes


def test_the_rest_of_a_storage_is_not_written() -> None:
    content = {"part": torch.arange(1000.0)[:2], "all": torch.ones(3)}
    found = gathering.on_host(content)
    assert found["part"].untyped_storage().nbytes() == 8
    assert found["all"] is content["all"] or found["all"].data_ptr() == content["all"].data_ptr()
