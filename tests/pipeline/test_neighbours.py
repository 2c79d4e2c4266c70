"""Stages find each other: over real process groups, twice in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.pipeline.wire.transport import Transport
from tests.workers import end_with_parent, free_port, worker_context


def test_every_transport_has_links_of_its_own() -> None:
    """What an earlier one left unread cannot be taken for a message of a later one."""
    assert _on_three_ranks(_sum_twice) == [6.0, 6.0]


def _sum_twice(mesh: Mesh) -> list[float]:
    totals = []
    for _ in range(2):
        transport = Transport(mesh, torch.device("cpu"), 2**20)
        own = torch.full((1,), float(mesh.stage + 1), dtype=torch.float64)
        part = own if mesh.is_last else own + transport.receive_part(0, 1)
        if mesh.is_first:
            transport.send_total(0, part)
            transport.send_total(9, part)  # nobody ever asks for this one
        else:
            transport.send_part(0, part)
            totals.append(float(transport.receive_total(0, 1)))
    return totals


def _on_three_ranks(function: Callable[[Mesh], Any]) -> Any:
    """What ``function`` returns on the last stage of three."""
    context, port = worker_context(), free_port()
    results = context.Queue()
    processes = [context.Process(target=_run, args=(rank, port, function, results), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        return results.get(timeout=60)
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()


def _run(rank: int, port: int, function: Callable[[Mesh], Any], results: Any) -> None:
    end_with_parent()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    mesh = Mesh(3, 1, rank)
    mesh.connect()
    outcome = function(mesh)
    if mesh.is_last:
        results.put(outcome)
    dist.barrier()
    dist.destroy_process_group()
