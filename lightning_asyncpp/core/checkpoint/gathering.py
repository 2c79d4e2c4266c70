"""Brings what ranks hold to rank 0, which writes it into one file; nothing is unpickled that could be code."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import different_calls, lost_peers

_TAG = 7
_GATHERS = "gathers"
_PIECE_BYTES = 64 * 2**20


def gather(mesh: Mesh, part: Any, ranks: Sequence[int]) -> list[Any]:
    """Gather nested content of some ranks on rank 0, in their order; elsewhere an empty list.

    A blocking collective of all ranks. Parts come one after the other, so that the host of rank 0 holds one of them
    twice at most; all tensors are on the host then.

    Args:
        mesh: this rank's place.
        part: of this rank; what ``torch.load(weights_only=True)`` reads.
        ranks: whose parts are wanted.

    Raises:
        ProtocolError: another rank is in another call.
    """
    if mesh.groups is None:
        return [part]
    if {*exchange(mesh, _GATHERS)} != {_GATHERS}:
        raise different_calls("this rank gathers what a checkpoint holds, and another one does not")
    if mesh.rank == 0:
        return [_receive(mesh.groups.host, rank) if rank else on_host(part) for rank in ranks]
    if mesh.rank in ranks:
        sender = _Sender(mesh.groups.host)
        try:
            with io.BufferedWriter(sender, _PIECE_BYTES) as stream:
                torch.save(part, stream)
        except Exception as error:
            raise (sender.error or error) from None  # torch says only that its file has another length
        sender.send_size(0)
    return []


def on_host(content: Any, copy: bool = False) -> Any:
    """The same with tensors on the host; what is one tensor stays one.

    Args:
        content: nested containers.
        copy: whether tensors that are there already are copied.
    """
    known: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            # Of a view torch would write the whole storage.
            is_part = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes
            known[id(tensor)] = tensor.detach().to("cpu", copy=copy or is_part)
        return known[id(tensor)]

    return map_tensors(moved, content)


class _Sender(io.RawIOBase):
    """Sends what is written to rank 0, in pieces, each after its size; :class:`io.BufferedWriter` makes them large."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._group = group

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Send the bytes, or the first of many; how many that were."""
        piece = torch.frombuffer(bytearray(memoryview(data)[:_PIECE_BYTES]), dtype=torch.uint8)
        try:
            self.send_size(len(piece))
            with lost_peers():
                dist.send(piece, 0, group=self._group, tag=_TAG)
        except Exception as error:
            self.error = error
            raise
        return len(piece)

    def send_size(self, size: int) -> None:
        """Announce a piece; 0 ends them."""
        with lost_peers():
            dist.send(torch.tensor([size]), 0, group=self._group, tag=_TAG)


def _receive(group: dist.ProcessGroup, rank: int) -> Any:
    """What a rank sends, all of it."""
    file, size = io.BytesIO(), torch.zeros(1, dtype=torch.int64)
    with lost_peers():
        dist.recv(size, rank, group=group, tag=_TAG)
        while int(size):
            piece = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(piece, rank, group=group, tag=_TAG)
            file.write(piece.numpy().data)
            dist.recv(size, rank, group=group, tag=_TAG)
    file.seek(0)
    # On the host: a device of another rank need not be one of this machine.
    return torch.load(file, map_location="cpu", weights_only=True)
