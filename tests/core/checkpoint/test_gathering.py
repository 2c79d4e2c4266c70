"""What stages hold comes to rank 0 whole, whatever travels together on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.checkpoint import gathering
from lightning_asyncpp.core.checkpoint.gathering import gather_stages
from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.core.failures.failing_cases import run_ranks


def part_of(stage: int) -> dict[str, Any]:
    """Small and large tensors of several dtypes, one of them twice, some without elements, and what is no tensor."""
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


def gathered(mesh: Mesh, limit: int) -> list[Any]:
    gathering._BUNDLE_BYTES = limit
    found = gather_stages(mesh, part_of(mesh.stage))
    return [flat(part) == flat(part_of(stage)) for stage, part in enumerate(found)]


@pytest.mark.parametrize("limit", [gathering._BUNDLE_BYTES, 64])
def test_every_stage_arrives(limit: int) -> None:
    outcomes = run_ranks(gathered, 3, limit)
    assert [outcome.value for outcome in outcomes] == [[True] * 3, [], []], outcomes


def test_small_tensors_travel_together() -> None:
    sizes = {"a": 600_000, "nothing": 0, "b": 600_000, "c": 3, "large": 5_000_000, "d": 1}
    assert list(gathering._bundles(sizes)) == [["a"], ["b", "c"], ["large"], ["d"]]
