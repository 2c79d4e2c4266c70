"""The worker pools that all tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.helpers.cases import Case
from tests.helpers.engine import run_case
from tests.helpers.engine_pool import Prepare, WorkerPool
from tests.helpers.workers import opened


class Pools:
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


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with opened(Pools()) as pools:
        yield pools
