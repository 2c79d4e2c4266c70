"""All stages in one process: one at a time, each with its own random numbers, and the first error is the one raised."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_asyncpp.core.host_copies import HostCopy
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.link import Neighbours
from lightning_asyncpp.tools.check.in_turns import run_in_turns

CPU = torch.device("cpu")


def pass_on(mesh: Mesh, neighbours: Neighbours, number: int = 0) -> int:
    """Give a number to the next stage, one larger."""
    if neighbours.before is not None:
        number = neighbours.before.read_frame().number + 1
    if neighbours.after is not None:
        neighbours.after.write(1, number, [])
    return number


def test_every_stage_has_its_neighbours() -> None:
    assert run_in_turns(5, pass_on, CPU) == [0, 1, 2, 3, 4]
    assert run_in_turns(1, pass_on, CPU) == [0]
    assert run_in_turns(3, lambda mesh, _: (mesh.stage, mesh.rank, mesh.num_stages), CPU) == [
        (0, 2, 3), (1, 1, 3), (2, 0, 3),
    ]  # fmt: skip


def test_one_runs_at_a_time() -> None:
    running, most = 0, 0

    def work(mesh: Mesh, neighbours: Neighbours) -> None:
        nonlocal running, most
        for _ in range(20):
            running += 1
            most = max(most, running)
            torch.randn(2000).sort()
            running -= 1
            pass_on(mesh, neighbours)

    run_in_turns(4, work, CPU)
    assert (running, most) == (0, 1)


def test_random_numbers_are_those_of_a_stage_that_runs_alone() -> None:
    def work(mesh: Mesh, neighbours: Neighbours) -> list[float]:
        torch.manual_seed(mesh.stage)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            pass_on(mesh, neighbours)  # others draw meanwhile
            drawn.append(float(torch.rand(())))
        return drawn

    before = torch.get_rng_state()
    drawn = run_in_turns(3, work, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    for stage, numbers in enumerate(drawn):
        generator = torch.Generator().manual_seed(stage)
        assert numbers == [float(torch.rand((), generator=generator)) for _ in range(6)]


def test_messages_between_any_two_stages_keep_their_order() -> None:
    def work(mesh: Mesh, neighbours: Neighbours) -> list[list[float]]:
        others = [mesh.rank_of(stage) for stage in range(3) if stage != mesh.stage]
        rooms = [torch.zeros(2) for _ in range(2 * len(others))]
        receives = [mesh.receive(room, rank, tag=7) for room, rank in zip(rooms, [*others, *others])]
        for number in range(2):
            for rank in others:
                mesh.send(HostCopy(torch.tensor([mesh.rank, number])), rank, tag=7)
        for receive in reversed(receives):
            receive.wait()
            assert receive.is_completed()
        return [room.tolist() for room in rooms]

    for stage, received in enumerate(run_in_turns(3, work, CPU)):
        others = [2 - other for other in range(3) if other != stage]
        assert received == [[rank, number] for number in range(2) for rank in others]


def test_who_waits_for_a_message_ends_when_another_stage_fails() -> None:
    def work(mesh: Mesh, neighbours: Neighbours) -> None:
        if mesh.is_last:
            raise KeyError("the user's own mistake")
        mesh.receive(torch.zeros(1), mesh.rank_of(2), tag=7).wait()

    with pytest.raises(KeyError):
        run_in_turns(3, work, CPU)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_first_error_is_raised_and_nobody_waits(stage: int) -> None:
    def work(mesh: Mesh, neighbours: Neighbours) -> None:
        pass_on(mesh, neighbours)
        if mesh.stage == stage:
            raise KeyError("the user's own mistake")
        pass_on(mesh, neighbours)
        if neighbours.after is not None:
            neighbours.after.read_frame()

    threads = threading.active_count()
    with pytest.raises(KeyError, match="the user's own mistake"):
        run_in_turns(3, work, CPU)
    assert threading.active_count() == threads
