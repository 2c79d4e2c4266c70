"""One clock for all ranks: how far each process's ``time.perf_counter`` is from that of rank 0.

Processes of one host read the same clock, so only one of each other host asks rank 0 for the time, again and again; the
quickest answer tells the difference best, as it can be wrong by half of its round trip at most.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import lost_peers

ROUNDS = 24
_TAG_ASK, _TAG_TELL = 1_000_000, 1_000_001  # far from the numbers of messages under way in the same group


@dataclass(frozen=True)
class ClockOffset:
    """A process's clock against rank 0's.

    Attributes:
        seconds: added to this process's ``time.perf_counter()`` it gives rank 0's.
        error: by how much that may be wrong, in seconds: half of the quickest round trip; 0 on rank 0's host.
    """

    seconds: float = 0.0
    error: float = 0.0


def host_name() -> str:
    """A name that only processes which share a clock share: of this start of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def clock_offset(
    mesh: Mesh, host: str | None = None, now: Callable[[], float] = time.perf_counter, rounds: int = ROUNDS
) -> ClockOffset:
    """Compare this process's clock with rank 0's; a blocking collective.

    Args:
        mesh: this rank's place, connected.
        host: name that only processes with the same clock share; default: :func:`host_name`.
        now: the clock, in seconds.
        rounds: how often the time is asked for.
    """
    hosts = exchange(mesh, host_name() if host is None else host)
    own = ClockOffset()
    leaders = _other_leaders(hosts)
    with lost_peers():
        for leader in leaders:
            if mesh.rank == 0:
                _tell(mesh, leader, now, rounds)
            elif mesh.rank == leader:
                own = _ask(mesh, now, rounds)
    found = exchange(mesh, json.dumps([own.seconds, own.error])) if leaders else []
    leader = hosts.index(hosts[mesh.rank])
    return ClockOffset(*json.loads(found[leader])) if leaders and leader else ClockOffset()


def _other_leaders(hosts: Sequence[str]) -> list[int]:
    """The first rank of each host but rank 0's."""
    return sorted({hosts.index(host) for host in hosts} - {0})


def _ask(mesh: Mesh, now: Callable[[], float], rounds: int) -> ClockOffset:
    assert mesh.groups is not None
    question, answer = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    best = ClockOffset(0.0, float("inf"))
    for _ in range(rounds):
        asked = now()
        dist.send(question, 0, group=mesh.groups.host, tag=_TAG_ASK)
        dist.recv(answer, 0, group=mesh.groups.host, tag=_TAG_TELL)
        answered = now()
        if (answered - asked) / 2 < best.error:
            best = ClockOffset(float(answer) - (asked + answered) / 2, (answered - asked) / 2)
    return best


def _tell(mesh: Mesh, rank: int, now: Callable[[], float], rounds: int) -> None:
    assert mesh.groups is not None
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        dist.recv(question, rank, group=mesh.groups.host, tag=_TAG_ASK)
        dist.send(torch.tensor([now()], dtype=torch.float64), rank, group=mesh.groups.host, tag=_TAG_TELL)
