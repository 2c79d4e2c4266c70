"""How long a message takes between two processes of a benchmark, before anything else runs."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

_ROUNDS = 10


def measure_messages(hosts: int) -> dict[str, float]:
    """Milliseconds one way, the median of a few small messages there and back; a collective call.

    Returns:
        On rank 0: ``message_ms`` between two processes of a host, and ``link_message_ms`` between two hosts, where
        there are such.
    """
    processes = dist.get_world_size()
    peers = {"message_ms": 1} if processes > hosts else {}
    if hosts > 1:
        peers["link_message_ms"] = processes - 1
    return {name: _one_way(peer) for name, peer in peers.items()}


def _one_way(peer: int) -> float:
    """Milliseconds between ranks 0 and ``peer``; 0 on the other ranks."""
    dist.barrier()
    rank, token, times = dist.get_rank(), torch.zeros(1), []
    for _ in range(_ROUNDS if rank in (0, peer) else 0):
        start = time.perf_counter()
        for sender in (0, peer):
            if rank == sender:
                dist.send(token, peer - rank)
            else:
                dist.recv(token, peer - rank)
        times.append((time.perf_counter() - start) / 2 * 1e3)
    return statistics.median(times) if times else 0.0
