"""What the engine does per microbatch grows neither with the length of the run nor with stages or microbatches.

Calls of Python functions are counted, not seconds: the count is that of the program, not of the machine. How often a
stage looks for what has not arrived depends on the machine, so the cheapest of several mini-batches counts.
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings
from tests.helpers.workers import end_with_parent, free_port, worker_context

DIM, SAMPLES, EARLY, LENGTH = 4, 8, 5, 150
ALLOWED = 1.02
"""What may be lost to looking once more for a message."""


class Cost(NamedTuple):
    """Of the cheapest mini-batch among some, per microbatch and stage; and how many objects Python knew after them."""

    calls: list[float]
    objects: list[int]


@pytest.mark.slow
def test_a_long_run_costs_per_mini_batch_what_a_short_one_does() -> None:
    early, late = measured(stages=3, microbatches=4, at=[EARLY, LENGTH])
    assert min(early.calls) > 20
    for before, after in zip(early.calls, late.calls, strict=True):
        assert after <= before * ALLOWED
    for before, after in zip(early.objects, late.objects, strict=True):
        assert after <= before + 20  # far less than one per mini-batch


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(3, 24), (6, 8)])
def test_more_microbatches_or_stages_make_none_dearer(stages: int, microbatches: int) -> None:
    (few,) = measured(stages=3, microbatches=8, at=[EARLY])
    (many,) = measured(stages=stages, microbatches=microbatches, at=[EARLY])
    assert max(many.calls) <= max(few.calls) * ALLOWED


@functools.cache
def _measured(stages: int, microbatches: int, at: tuple[int, ...]) -> list[Cost]:
    context = worker_context()
    results, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_work, args=(rank, stages, microbatches, at, port, results), daemon=True)
        for rank in range(stages)
    ]
    for process in processes:
        process.start()
    of_ranks = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=20)
    return [Cost(*map(list, zip(*(rank[i] for rank in sorted(of_ranks))))) for i in range(len(at))]


def measured(stages: int, microbatches: int, at: list[int]) -> list[Cost]:
    """The cost of a few mini-batches from each of ``at`` on."""
    return _measured(stages, microbatches, tuple(at))


def _work(rank: int, stages: int, microbatches: int, at: tuple[int, ...], port: int, results: Any) -> None:
    end_with_parent()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=stages, timeout=datetime.timedelta(seconds=60))
    mesh = Mesh(stages, 1, rank)
    mesh.connect()
    results.put(_train(mesh, microbatches, at))
    dist.barrier()
    dist.destroy_process_group()


def _train(mesh: Mesh, microbatches: int, at: tuple[int, ...]) -> list[tuple[float, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(mesh.num_stages)])
    settings = PipelineSettings(microbatches).resolved(mesh.num_stages)
    device = torch.device("cpu")
    engine = Engine(cut(model, mesh.stage, mesh.num_stages, 0, device), mesh, settings, 0, device, UserHooks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine.updates.apply = lambda _: optimizer.step() and None
    batch = torch.ones(microbatches, DIM)

    def step(microbatch: Tensor, weight: float) -> Tensor:
        return model(microbatch).square().mean()

    def train_batch() -> None:
        engine.run(batch, step)
        engine.complete()
        engine.apply_due()

    costs = []
    for t in range(at[-1] + SAMPLES):
        if t in at:
            costs.append([])
        if costs and len(costs[-1]) < SAMPLES:
            with _counting() as count:
                train_batch()
            costs[-1].append((count[0] / microbatches, _objects()))
        else:
            train_batch()
    engine.drain()
    return [(min(calls for calls, _ in some), min(objects for _, objects in some)) for some in costs]


@contextmanager
def _counting() -> Iterator[list[int]]:
    count = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())
