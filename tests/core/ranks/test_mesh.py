"""Who stands where: ranks, stages and replicas."""

from __future__ import annotations

import pytest

from lightning_asyncpp.core.ranks.mesh import Mesh

SHAPES = [(1, 1), (1, 3), (4, 1), (2, 2), (2, 3), (3, 2), (4, 4), (5, 3)]


@pytest.mark.parametrize(("stages", "replicas"), SHAPES)
def test_every_stage_of_every_replica_has_one_rank(stages: int, replicas: int) -> None:
    meshes = [Mesh(stages, replicas, rank) for rank in range(stages * replicas)]
    assert {(mesh.stage, mesh.replica) for mesh in meshes} == {(s, r) for s in range(stages) for r in range(replicas)}
    for mesh in meshes:
        assert mesh.rank_of(mesh.stage) == mesh.rank_of(mesh.stage, mesh.replica) == mesh.rank
        assert all(mesh.rank_of(m.stage, m.replica) == m.rank for m in meshes)
        assert [(mesh.stage_of(m.rank), mesh.replica_of(m.rank)) for m in meshes] == [
            (m.stage, m.replica) for m in meshes
        ]
        assert (mesh.is_first, mesh.is_last) == (mesh.stage == 0, mesh.stage == stages - 1)
        assert mesh.world_size == stages * replicas
    assert (meshes[0].is_last, meshes[0].replica) == (True, 0)


def test_which_ranks_are_neighbours() -> None:
    meshes = [Mesh(3, 2, rank) for rank in range(6)]
    assert [mesh.stage for mesh in meshes] == [2, 1, 0, 2, 1, 0]
    assert [mesh.replica for mesh in meshes] == [0, 0, 0, 1, 1, 1]
