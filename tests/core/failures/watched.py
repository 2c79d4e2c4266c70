"""Scenarios in which processes watch each other, and a rank is lost, fails or ends."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from lightning_asyncpp.core import failure_watch
from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import PeerLostError

SOON = 25.0
KEPT: list[FailureWatch] = []


def begun(mesh: Mesh) -> FailureWatch:
    failure_watch.GRACE_SECONDS = 0.3
    watch = FailureWatch()
    watch.start(mesh)
    KEPT.append(watch)
    return watch


def wait_for_others(mesh: Mesh, watch: FailureWatch) -> None:
    """Wait for the other ranks in a collective, which fails if a rank is lost."""
    assert mesh.groups is not None
    with watch.collective():
        dist.barrier(group=mesh.groups.host)
        time.sleep(0.5)
        dist.barrier(group=mesh.groups.host)


def killed(mesh: Mesh, rank: int) -> None:
    watch = begun(mesh)
    dist.barrier()
    if mesh.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_others(mesh, watch)


def error_of_one(mesh: Mesh, rank: int, waits: bool) -> str:
    """Fail on one rank, whose process lives on; return each rank's error. Others wait for it, or poll their watch."""
    watch = begun(mesh)
    dist.barrier()
    try:
        if mesh.rank == rank:
            raise ValueError("the user's own mistake")
        if waits:
            wait_for_others(mesh, watch)
        end = time.monotonic() + SOON
        while watch.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        watch.check()
    except (ValueError, PeerLostError) as error:
        watch.fail(error)
        return str(error)
    return "nothing happened"


def ends_early(mesh: Mesh) -> str:
    """End rank 0, which serves the store, without an error while the others still compute."""
    watch = begun(mesh)
    dist.barrier()
    if mesh.rank == 0:
        os._exit(0)
    time.sleep(2.5)  # the watch reads the store once a second
    watch.check()
    os._exit(7)  # skip the barrier after each scenario
