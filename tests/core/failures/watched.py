"""What a guard watches over in tests, and ways for real processes to be lost, or not to be."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from lightning_asyncpp.core.failures.guard import Guard
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError, PeerLostError

LIMIT = 4.0  # busy machines let a process wait for seconds
SOON = 20.0
SLOW = 5.0  # longer than what is then the limit


@dataclass(eq=False)
class Session:
    """Notes what it is told."""

    lost: list[tuple[str, bool]] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)

    def lose(self, error: PeerLostError, is_gone: bool) -> None:
        self.lost.append((str(error), is_gone))
        self.told.set()

    def disconnect(self) -> None:
        pass


def begun(mesh: Mesh, limit: float = LIMIT) -> tuple[Session, Guard]:
    session = Session()
    guard = Guard(limit, session)
    guard.begin(mesh)
    return session, guard


def lost_by(mesh: Mesh, rank: int, number: int, limit: float) -> None:
    """A rank sends itself a signal; the others raise what they are told of it."""
    session, guard = begun(mesh, limit)
    dist.barrier()
    if mesh.rank == rank:
        os.kill(os.getpid(), number)
        time.sleep(SOON)  # after it was stopped and goes on
    session.told.wait(SOON)
    guard.release()
    guard._kill_stopped()
    ((text, is_gone),) = session.lost
    assert is_gone
    raise PeerLostError(text)


def killed(mesh: Mesh, rank: int) -> None:
    lost_by(mesh, rank, signal.SIGKILL, 60.0)


def stopped(mesh: Mesh, rank: int) -> None:
    lost_by(mesh, rank, signal.SIGSTOP, LIMIT)


def slow(mesh: Mesh) -> list[tuple[str, bool]]:
    """One rank sleeps, one computes, and one leaves early: nobody is missed."""
    session, guard = begun(mesh, SLOW - 2.0)
    end = time.monotonic() + SLOW
    if mesh.rank == 0:
        time.sleep(SLOW)
    elif mesh.rank == 1:
        while time.monotonic() < end:
            sum(range(10_000))
    else:
        guard.end()
        time.sleep(SLOW)
    dist.barrier()
    guard.end()
    return session.lost


def error_of_one(mesh: Mesh, rank: int) -> tuple[str, list[tuple[str, bool]]]:
    """A rank fails; the others see no more than that a connection breaks."""
    session, guard = begun(mesh, 60.0)
    dist.barrier()
    try:
        if mesh.rank == rank:
            raise ValueError("the user's own mistake")
        raise PeerLostError("a neighbour is gone")
    except Exception as error:
        guard.fail(error)
        guard.release()
        text = str(error)
    dist.barrier()
    guard.end()
    return text, session.lost


def error_of_all(mesh: Mesh) -> str:
    """All ranks raise the same, as they do for a configuration that cannot run."""
    _, guard = begun(mesh, 60.0)
    dist.barrier()
    error = ConfigurationError("lower it")
    guard.fail(error)
    guard.release()
    dist.barrier()
    guard.end()
    return str(error)


def again_and_again(mesh: Mesh) -> list[list[int]]:
    """How many threads and open files there are after one run, and after many."""
    counts = []
    for times in (1, 20):
        for _ in range(times):
            _, guard = begun(mesh, 60.0)
            dist.barrier()
            guard.end()
        time.sleep(0.3)  # a thread that was told to end is listed until it has
        counts.append([len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")])
    return counts
