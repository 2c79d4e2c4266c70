"""Settings and fixtures for all tests."""

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

# Use the same examples everywhere and no deadline, since machines that run tests are sometimes slow.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Lightning's launchers set more, also for later tests

# A shell's background job ignores SIGINT, and so would the child processes to which tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, which would dominate short tests; start the fork server."""
    gc.collect()
    gc.freeze()
    fork_server()


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> Iterator[None]:
    """Give each test its own port, and remove environment variables and the process group of earlier tests.

    Lightning keeps the port of the first training in a process, where the store of that training still listens. It also
    chooses ports that another connection may take before they are used. A module's fixture may have set the seed.
    """
    with patch.dict(os.environ, MASTER_PORT=str(free_port())):
        os.environ.pop("PL_GLOBAL_SEED", None)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Return pools of workers for one test module; lasting pools would accumulate threads and state of scenarios."""
    with opened(Pools()) as pools:
        yield pools


@pytest.fixture(scope="module")
def engine_pools() -> Iterator[EnginePools]:
    """Return pools of workers that run only the engine."""
    with opened(EnginePools()) as pools:
        yield pools
