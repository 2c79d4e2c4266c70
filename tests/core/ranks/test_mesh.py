"""Who stands where: ranks, stages and replicas in both placements."""

from __future__ import annotations

import pytest

from lightning_asyncpp.core.ranks.mesh import PLACEMENTS, Mesh, Placement

SHAPES = [(1, 1), (1, 3), (4, 1), (2, 2), (2, 3), (3, 2), (4, 4), (5, 3)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("stages", "replicas"), SHAPES)
def test_every_stage_of_every_replica_has_one_rank(stages: int, replicas: int, placement: Placement) -> None:
    meshes = [Mesh(stages, replicas, rank, placement=placement) for rank in range(stages * replicas)]
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


@pytest.mark.parametrize(
    ("placement", "stages", "replicas"),
    [("pipeline_within_node", [2, 1, 0, 2, 1, 0], [0, 0, 0, 1, 1, 1]),
     ("pipeline_across_nodes", [2, 2, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1])],
)  # fmt: skip
def test_which_ranks_are_neighbours(placement: Placement, stages: list[int], replicas: list[int]) -> None:
    meshes = [Mesh(3, 2, rank, placement=placement) for rank in range(6)]
    assert [mesh.stage for mesh in meshes] == stages
    assert [mesh.replica for mesh in meshes] == replicas


@pytest.mark.parametrize("across", [False, True])
def test_a_node_with_as_many_devices_as_the_placement_says_holds_one_replica_or_one_stage(across: bool) -> None:
    stages, replicas = 3, 4
    placement = PLACEMENTS[across]
    per_node = replicas if across else stages
    meshes = [Mesh(stages, replicas, rank, placement=placement) for rank in range(12)]
    nodes = [meshes[first : first + per_node] for first in range(0, 12, per_node)]
    assert all(len({mesh.stage if across else mesh.replica for mesh in node}) == 1 for node in nodes)


@pytest.mark.parametrize(("stages", "replicas"), SHAPES)
def test_places_do_not_depend_on_the_placement(stages: int, replicas: int) -> None:
    """What is summed over all ranks is added in the same order, whichever rank a stage has."""
    within, across = (Mesh(stages, replicas, 0, placement=placement) for placement in PLACEMENTS)
    for replica in range(replicas):
        for stage in range(stages):
            place = within.place_of(within.rank_of(stage, replica))
            assert place == within.rank_of(stage, replica)
            assert across.place_of(across.rank_of(stage, replica)) == place


def test_the_log_names_the_placement_where_it_matters() -> None:
    def described(stages: int, replicas: int, placement: Placement) -> str:
        return Mesh(stages, replicas, 0, placement=placement).describe_placement()

    assert described(2, 2, "pipeline_across_nodes") == " across nodes"
    assert described(2, 2, "pipeline_within_node") == ""
    assert described(4, 1, "pipeline_across_nodes") == described(1, 4, "pipeline_across_nodes") == ""
