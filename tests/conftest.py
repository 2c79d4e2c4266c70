"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

import tests.helpers.spared  # noqa: F401
from tests.helpers.pool import EnginePools, Pools, fork_server, free_port, opened

# The same examples everywhere, and no time limit: machines that run tests are slow at times.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # or Lightning's launchers give this process more, for all tests to come

# A shell's background job ignores it, and so would every process that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what imports made out of all later collections, which take most of a short test's time with it."""
    gc.collect()
    gc.freeze()
    fork_server()


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> Iterator[None]:
    """Give each test a port of its own, and leave it neither variables nor a process group of the one before.

    Lightning keeps the port of a process's first training, where the store of a training in this process stays; and it
    takes a port that any connection of the machine may get meanwhile. A module's fixture may have seeded everything.
    """
    with patch.dict(os.environ, MASTER_PORT=str(free_port())):
        os.environ.pop("PL_GLOBAL_SEED", None)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Return worker processes of one module: pools that stay gather threads and what scenarios set in a worker."""
    with opened(Pools()) as pools:
        yield pools


@pytest.fixture(scope="module")
def engine_pools() -> Iterator[EnginePools]:
    """Return worker processes that run the engine alone."""
    with opened(EnginePools()) as pools:
        yield pools
