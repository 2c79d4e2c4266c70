"""Pieces on the host are in order, and a message waits for its host copy."""

from __future__ import annotations

import threading

import torch

from lightning_asyncpp.core.host_copies import HostCopy, pieces_on_host
from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.helpers.failing import run_ranks


def test_pieces_hold_all_elements_in_order() -> None:
    tensor = torch.arange(1000, dtype=torch.float64).view(10, 100).t()
    pieces = list(pieces_on_host(tensor, piece_bytes=100))
    assert {piece.numel() for piece in pieces} == {12, 4}
    assert torch.equal(torch.cat(pieces), tensor.reshape(-1))
    assert [piece.numel() for piece in pieces_on_host(torch.zeros(3), piece_bytes=1)] == [1, 1, 1]


class LateCopy(HostCopy):
    """Copy that completes late, as from a GPU; its tensor holds NaN until :meth:`wait` returns."""

    def __init__(self, value: float) -> None:
        super().__init__(torch.full((4,), float("nan")))
        self.value, self.arrived = value, threading.Event()

    def is_done(self) -> bool:
        return self.arrived.is_set()

    def wait(self) -> torch.Tensor:
        self.arrived.wait()
        return self.tensor.fill_(self.value)


def exchanged(mesh: Mesh) -> list[float]:
    """Send two copies with different tags, which complete in reverse order; return the values that rank 1 receives."""
    if mesh.rank == 0:
        copies = LateCopy(1.0), LateCopy(2.0)
        works = [mesh.send(copy, 1, tag) for copy, tag in zip(copies, (100, 200))]
        for copy in reversed(copies):
            copy.arrived.set()
        for work in works:
            work.wait()
        return []
    received = torch.zeros(4), torch.zeros(4)
    for work in [mesh.receive(tensor, 0, tag) for tensor, tag in zip(received, (100, 200))]:
        work.wait()
    return [tensor[0].item() for tensor in received]


def test_what_is_sent_before_its_copy_is_there_leaves_then() -> None:
    outcomes = run_ranks(exchanged, 2)
    assert [outcome.value for outcome in outcomes] == [[], [1.0, 2.0]], outcomes
