"""Brings what ranks hold to rank 0, which writes it into one file; nothing is unpickled that could be code."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.host_copies import as_bytes, pieces_on_host
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.errors import different_calls, lost_peers

_TAG = 7
_GATHERS = "gathers"
_SMALL_BYTES = 2**14  # such tensors travel together: each message takes a millisecond


def gather(mesh: Mesh, part: Any, ranks: Sequence[int]) -> list[Any]:
    """Gather nested content of some ranks on rank 0, in their order; an empty list on others.

    A blocking collective of all ranks. All tensors are on the host of rank 0 then; nobody holds a second copy of all.

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
        _send(mesh.groups.host, part)
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


def _send(group: dist.ProcessGroup, part: Any) -> None:
    """Send a part to rank 0: first all but its large tensors, for which others on the meta device stand; then these."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            is_small = tensor.nbytes <= _SMALL_BYTES
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            known[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True) if is_small else empty
        return known[id(tensor)][1]

    file = io.BytesIO()
    torch.save(map_tensors(stand_in, part), file)
    text = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    with lost_peers():
        dist.send(torch.tensor([len(text)]), 0, group=group, tag=_TAG)
        for tensor in (text, *(tensor for tensor, other in known.values() if other.is_meta)):
            for piece in pieces_on_host(as_bytes(tensor)):
                dist.send(piece, 0, group=group, tag=_TAG)


def _receive(group: dist.ProcessGroup, rank: int) -> Any:
    """What a rank sends, in the same order."""
    received: dict[int, Tensor] = {}

    def with_content(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in received:
            received[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            fill(received[id(tensor)])
        return received[id(tensor)]

    def fill(tensor: Tensor) -> None:
        for piece in pieces_on_host(as_bytes(tensor)):  # of this very memory
            dist.recv(piece, rank, group=group, tag=_TAG)

    with lost_peers():
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=group, tag=_TAG)
        fill(text := torch.empty(int(size), dtype=torch.uint8))
        # On the host: a device of another rank need not be one of this machine.
        part = torch.load(io.BytesIO(text.numpy().data), map_location="cpu", weights_only=True)
        return map_tensors(with_content, part)
