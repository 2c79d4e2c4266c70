"""Where processes that tests start come from, and what they have in common."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import multiprocessing as mp

_IMPORTED = [
    *("pytest", "hypothesis", "lightning.pytorch.cli"),  # which come with the scenarios that test modules define
    *(
        f"tests.{name}"
        for name in ("helpers.spared", "faults.script", "helpers.fabric", "helpers.engine", "storage.saves")
    ),
    *("tests.helpers.trainer", "tests.helpers.pool", "tests.helpers.engine_pool"),
]
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def worker_context() -> Any:
    """A fork server that has imported the tests' modules already: a new process costs milliseconds, not seconds.

    There is one per test process, which imports what its first user names: so all name the same.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class Closable(Protocol):
    """Pools of worker processes."""

    def close(self) -> None:
        """End them."""


P = TypeVar("P", bound=Closable)


@contextmanager
def opened(pools: P) -> Iterator[P]:
    """Pools for a module's tests, beside which this process computes with one thread, as the workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pools
    pools.close()
    torch.set_num_threads(threads)


def end_with_parent() -> None:
    """Let this worker end when the process that made it is gone: killed tests would leave it busy."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not called in a worker"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def free_port() -> int:
    """One that no connection of another process gets by chance until it is used."""
    ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0]) if _EPHEMERAL_PORTS.exists() else 32_768
    while True:
        port = 10_000 + secrets.randbelow(ephemeral - 10_000)  # random numbers are seeded alike in all workers
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
