"""Brings what the stages hold to rank 0, which writes it into one file; nothing is unpickled that could be code."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.host_copies import as_bytes, on_host, pieces_on_host
from lightning_asyncpp.core.ranks.agreement import exchange_bytes
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import different_calls, lost_peers
from lightning_asyncpp.storage.nested import (
    STORED,
    entries_of,
    entry_bytes,
    entry_dtype,
    entry_shape,
    put_together,
    shard_of,
    take_apart,
)

_TAG = 7
_SAVED = b"PK"  # how begins what torch saves
_BUNDLE_BYTES = 2**20  # small tensors travel together, up to as much: each message takes a millisecond


def gather_stages(mesh: Mesh, part: Any) -> list[Any]:
    """Gather nested content of every stage of the first replica on rank 0, first stage first; elsewhere an empty list.

    A blocking collective. Tensors travel one by one or few by few, so that nobody holds a second copy of all of them;
    those of several ranks are on the host then.

    Args:
        mesh: this rank's place.
        part: this stage's; dictionaries, lists and tuples of tensors, and of what ``torch.load(weights_only=True)``
            reads.
    """
    if mesh.groups is None:
        return [part]
    skeletons, tensors = gather_skeletons(mesh, part)
    if mesh.rank == 0:
        return [put_together(skeleton, _receiver(mesh, skeleton, tensors)) for skeleton in skeletons]
    if mesh.replica == 0:
        with lost_peers():
            for names in _bundles({name: tensor.nbytes for name, tensor in tensors.items()}):
                for piece in _message([tensors[name] for name in names]):
                    dist.send(piece, 0, group=mesh.groups.host, tag=_TAG)
    return []


def gather_by_rank(mesh: Mesh, small: Any) -> list[Any]:
    """Gather the small content of every rank on rank 0, in the order of ranks; elsewhere an empty list.

    A blocking collective. Tensors of other ranks are on the host.

    Raises:
        ProtocolError: another rank is in another call.
    """
    if mesh.groups is None:
        return [small]
    file = io.BytesIO()
    if mesh.rank:
        torch.save(small, file)
    texts = exchange_bytes(mesh, file.getvalue())
    if mesh.rank == 0 and not all(text.startswith(_SAVED) for text in texts[1:]):
        raise different_calls("this rank gathers what a checkpoint holds, and another one does not")
    # On the host: a device of another rank need not be one of this machine.
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    return [] if mesh.rank else [small, *(load(io.BytesIO(text)) for text in texts[1:])]


def gather_skeletons(mesh: Mesh, part: Any, name_of: Callable[[int], str] = str) -> tuple[list[Any], dict[str, Tensor]]:
    """What is around the tensors of every stage of the first replica, on rank 0; and this rank's tensors.

    A blocking collective. An entry of a skeleton says where the tensor is: see :func:`shard_of`. Other ranks than 0
    get no skeletons.

    Args:
        mesh: this rank's place.
        part: this stage's content.
        name_of: stage -> what its entries call it.
    """
    skeleton, tensors = take_apart(part, shard=name_of(mesh.stage))
    by_rank = gather_by_rank(mesh, skeleton if mesh.replica == 0 else None)
    stages = range(mesh.num_stages if by_rank else 0)
    return [by_rank[mesh.rank_of(stage, replica=0)] for stage in stages], tensors


def _receiver(mesh: Mesh, skeleton: Any, own: dict[str, Tensor]) -> Any:
    """Receives the tensors of a stage in the order in which it sends them, each once."""
    assert mesh.groups is not None
    entries = {entry[STORED]: entry for entry in entries_of(skeleton)}
    stage = next((int(shard_of(entry)) for entry in entries.values()), mesh.stage)
    if stage == mesh.stage:
        on_this_host = {name: on_host(tensor) for name, tensor in own.items()}
        return lambda entry: on_this_host[entry[STORED]]
    received = {
        name: torch.empty(entry_shape(entry), dtype=entry_dtype(entry), device="cpu") for name, entry in entries.items()
    }
    for names in _bundles({name: entry_bytes(entry) for name, entry in entries.items()}):
        parts = [as_bytes(received[name]) for name in names]
        message = parts[0] if len(parts) == 1 else torch.empty(sum(map(len, parts)), dtype=torch.uint8)
        with lost_peers():
            for piece in pieces_on_host(message):  # of this very memory
                dist.recv(piece, mesh.rank_of(stage, replica=0), group=mesh.groups.host, tag=_TAG)
        if len(parts) > 1:
            for part, sent in zip(parts, message.split([len(part) for part in parts])):
                part.copy_(sent)
    return lambda entry: received[entry[STORED]]


def _message(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of some tensors, one after the other, in pieces on the host; small ones may be on several devices."""
    if len(tensors) == 1:
        return pieces_on_host(as_bytes(tensors[0]))
    return iter([torch.cat([as_bytes(on_host(tensor)) for tensor in tensors])])


def _bundles(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names of tensors that travel in one message, in order; those without elements do not."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if not size:
            continue
        if names and total + size > _BUNDLE_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
