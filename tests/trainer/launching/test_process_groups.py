"""The process groups of a Trainer or a Fabric go with it: each keeps threads that wake a hundred times a second."""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest

from lightning_asyncpp.core.ranks import mesh
from tests.helpers.cases import Case
from tests.helpers.fabric import Run as FabricRun
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit


def threads_after(kind: str) -> int:
    """Threads of this rank, once what was trained is gone; those of its groups end when the next are made."""
    grace, mesh.GRACE_SECONDS = mesh.GRACE_SECONDS, 0.0
    try:
        fit(Run(Net, "async", {"microbatches": 2})) if kind == "trainer" else FabricRun(Case(2))
    finally:
        mesh.GRACE_SECONDS = grace  # this process runs other tests, too
    gc.collect()
    time.sleep(0.2)  # a thread that was told to end is listed until it has
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_no_thread_outlives_its_run(pools: Pools, kind: str) -> None:
    _, before, after = (pools.run(2, threads_after, kind) for _ in range(3))
    assert all(now <= then for then, now in zip(before, after))
