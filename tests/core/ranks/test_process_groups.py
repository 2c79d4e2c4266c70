"""With NCCL and a default group bound to a device, few calls create the right groups on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_asyncpp.core.ranks import mesh as mesh_module
from lightning_asyncpp.core.ranks import process_groups
from lightning_asyncpp.core.ranks.mesh import Mesh

SHAPES = [(2, 1), (4, 1), (3, 2), (5, 3), (1, 4)]


class Splitting:
    """Fake of ``torch.distributed`` with NCCL, on one rank; a group is the list of its ranks."""

    group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=0))

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.splits: list[list[list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self) -> int:
        return self.rank

    def get_backend_config(self, group: object) -> str:
        return "cuda:nccl"

    def get_backend(self, group: object = None) -> str:
        return "nccl"

    def new_group(self, ranks: list[int] | None, timeout: object, backend: str | None, pg_options: object) -> str:
        assert ranks is None, "every other rank would have to split, too"
        assert pg_options is None
        return "gloo"

    def split_group(self, split_ranks: list[list[int]], timeout: object, pg_options: Any) -> list[int] | None:
        ranks = [rank for part in split_ranks for rank in part]
        assert len(ranks) == len(set(ranks)), "a rank would be in two groups of one split"
        self.splits.append(split_ranks)
        return next((part for part in split_ranks if self.rank in part), None)


@pytest.mark.parametrize(("stages", "replicas"), SHAPES)
def test_nccl_splits_as_rarely_as_can_be(stages: int, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for rank in range(stages * replicas):
        fake = Splitting(rank)
        for module in (mesh_module, process_groups):
            monkeypatch.setattr(module, "dist", fake)
        monkeypatch.setattr(mesh_module, "neighbour_options", lambda: None)
        mesh = Mesh(stages, replicas, rank)
        mesh.connect(direct=stages > 1)
        groups: Any = mesh.groups
        for there, back, other in (
            (groups.to_next, groups.from_next, mesh.stage + 1), (groups.from_prev, groups.to_prev, mesh.stage - 1)
        ):  # fmt: skip
            pair = {rank, mesh.rank_of(other)} if 0 <= other < stages else None
            assert [None if group is None else set(group) for group in (there, back)] == [pair, pair]
        same_stage = [mesh.rank_of(mesh.stage, replica) for replica in range(replicas)]
        assert groups.data_parallel == (same_stage if replicas > 1 else None)
        assert groups.last_stages == (same_stage if replicas > 1 and mesh.is_last else None)
        calls.append(fake.splits)
        mesh.groups = None
    assert all(splits == calls[0] for splits in calls), "all ranks make the same splits in the same order"
    most = {1: 0, 2: 2}.get(stages, 4) + (2 if replicas > 1 else 0)
    assert len(calls[0]) == most
