"""A pool of worker processes that stand in one mesh and run many cases, one after the other."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.helpers.cases import Case
from tests.helpers.engine import run_case
from tests.helpers.workers import end_with_parent, free_port, worker_context

Prepare = Callable[[int], Callable[[], None]]


class WorkerPool:
    """``world_size`` processes over gloo; with replicas they stand as D x P.

    Args:
        world_size: their number.
        prepare: called with the rank in each of them at its beginning; what it returns, after every case.
    """

    def __init__(self, world_size: int, prepare: Prepare | None = None) -> None:
        self.world_size = world_size
        context = worker_context()
        self._tasks = [context.SimpleQueue() for _ in range(world_size)]
        self._results = context.Queue()
        port = free_port()
        self._processes = [
            context.Process(target=_work, args=(rank, world_size, port, task, self._results, prepare), daemon=True)
            for rank, task in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def run(self, case: Case, timeout: float = 120.0) -> list[dict[str, Any]]:
        """Run a case on all ranks and return what each returned, by rank."""
        for task in self._tasks:
            task.put(case)
        results: dict[int, Any] = {}
        for _ in range(self.world_size):
            rank, outcome, error = self._results.get(timeout=timeout)
            if error:
                raise AssertionError(f"rank {rank} failed on {case}:\n{error}")
            results[rank] = outcome
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for task in self._tasks:
            task.put(None)
        for process in self._processes:
            process.join(timeout=20)
        self.kill()

    def kill(self) -> None:
        """End the processes that are still there: of a pool in which a rank failed, all."""
        for process in self._processes:
            if process.is_alive():
                process.kill()


def _work(rank: int, world_size: int, port: int, tasks: Any, results: Any, prepare: Prepare | None) -> None:
    end_with_parent()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60))
    check = prepare(rank) if prepare is not None else None
    meshes: dict[int, Mesh] = {}
    while (case := tasks.get()) is not None:
        try:
            replicas = kind = case.data_parallel_size
            if kind not in meshes:
                meshes[kind] = Mesh(world_size // replicas, replicas, rank)
                meshes[kind].connect(direct=check is not None)
            outcome = run_case(case, meshes[kind])
            if check is not None:
                check()
            results.put((rank, {k: _plain(v) for k, v in outcome.items()}, ""))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
            return
    dist.barrier()
    dist.destroy_process_group()


def _plain(value: Any) -> Any:
    # numpy arrays travel by value; tensors would be shared by file descriptor
    return {name: t.numpy() for name, t in value.items()} if isinstance(value, dict) else value


class EnginePools:
    """One pool per number of processes, started when first needed and replaced when a rank failed.

    Args:
        prepare: see :class:`WorkerPool`.
    """

    def __init__(self, prepare: Prepare | None = None) -> None:
        self._prepare = prepare
        self._pools: dict[int, WorkerPool] = {}

    def run(self, case: Case, num_stages: int) -> list[dict[str, Any]]:
        """Run a case; the results by rank, so the last stage of replica 0 comes first."""
        world_size = num_stages * case.data_parallel_size
        if world_size == 1:
            return [run_case(case, Mesh(1, 1, 0))]
        if world_size not in self._pools:
            self._pools[world_size] = WorkerPool(world_size, self._prepare)
        try:
            return self._pools[world_size].run(case)
        except BaseException:
            self._pools.pop(world_size).kill()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
