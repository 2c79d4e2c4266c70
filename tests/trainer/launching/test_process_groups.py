"""The process groups of a Trainer go with it: each keeps threads that wake a hundred times a second."""

from __future__ import annotations

import gc
import os
import sys
import time
from unittest.mock import patch

import pytest

from lightning_asyncpp.core.ranks import mesh
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit


def threads_after_a_run() -> int:
    """Threads of this rank; those of the run's groups end when the next are made."""
    with patch.object(mesh, "GRACE_SECONDS", 0.0):
        fit(Run(Net, "async", {"microbatches": 2}))
    gc.collect()
    time.sleep(0.2)  # a thread that was told to end is listed until it has
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_no_thread_outlives_its_run(pools: Pools) -> None:
    _, before, after = (pools.run(2, threads_after_a_run) for _ in range(3))
    assert all(now <= then for then, now in zip(before, after))
