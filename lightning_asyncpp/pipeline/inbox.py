"""Receives activations ahead of their use, so that what a stage needs next is there or already on its way.

A receive that is posted before its message is sent costs one hop; one that is posted after a header has been read costs
three more. See :mod:`lightning_asyncpp.pipeline.parcel` for how the size of a message is known before it is sent.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.header import Header, TensorInfo
from lightning_asyncpp.pipeline.mesh import Groups, Mesh, started
from lightning_asyncpp.pipeline.parcel import POSTED, Parcels, new_message

_KINDS = 3


class Tags(NamedTuple):
    """Message tags of one transport."""

    message: int
    tensor: int
    gradient: int

    @classmethod
    def of(cls, channel: int) -> Tags:
        """Tags of the ``channel``-th transport: what an earlier one left posted cannot take a message of this one."""
        return cls(*range((channel + 1) * 8, (channel + 1) * 8 + _KINDS))


class Arrival(NamedTuple):
    """An activation that arrived."""

    header: Header
    tensors: tuple[Tensor, ...]


class _Posted(NamedTuple):
    """A receive that was posted; which micro-batch it brings, and whether tensors come inside, will be seen."""

    number: int
    work: dist.Work
    message: Tensor
    tensors: tuple[Tensor, ...]


class Inbox:
    """Activations from the stage before.

    Args:
        mesh: this rank's place; its groups are connected.
        device: where tensors live.
        max_message_bytes: largest activation that is accepted, in bytes.
        tags: of the messages.
    """

    def __init__(self, mesh: Mesh, device: torch.device, max_message_bytes: int, tags: Tags) -> None:
        assert mesh.groups is not None, "an inbox needs a connected mesh"
        self.device, self.max_message_bytes, self.tags = device, max_message_bytes, tags
        self._groups: Groups = mesh.groups
        self._peer = mesh.rank_of(mesh.stage - 1)
        self._peer_name = f"rank {self._peer} (stage {mesh.stage - 1})"
        self._parcels = Parcels(device)
        self._posted: deque[_Posted] = deque()
        self._count = 0
        # Some receives are always posted, also between batches, whose first activations would come late otherwise.
        # Those that are left at the end are never met.
        self._post()

    def get(self, k: int) -> Arrival:
        """Return the next activation, that of micro-batch ``k``, waiting for it if need be.

        Raises:
            PeerLostError: the stage before is gone.
            ProtocolError: what came is not what was agreed on.
        """
        self._post()  # of what follows: while this one is awaited, that costs no time
        posted = self._posted.popleft()
        with lost_peers(self._peer_name):
            posted.work.wait()
        header = Header.read(posted.message.numpy().data, k, self.max_message_bytes)
        self._parcels.learn(posted.number, header.tensors)
        if self._parcels.holds(posted.number, header.tensors):
            return Arrival(header, posted.tensors)
        return Arrival(header, self._receive(header.tensors))

    def _post(self) -> None:
        while len(self._posted) < POSTED:
            message = new_message(self._parcels.size(self._count))
            with lost_peers(self._peer_name):
                work = started(dist.irecv(message, self._peer, group=self._groups.host, tag=self.tags.message))
            # The rooms in it are found now, while there is time, not when the message is there.
            self._posted.append(_Posted(self._count, work, message, self._parcels.unpack(self._count, message)))
            self._count += 1

    def _receive(self, infos: tuple[TensorInfo, ...]) -> tuple[Tensor, ...]:
        tensors = tuple(torch.empty(info.shape, dtype=info.dtype, device=self.device) for info in infos)
        with lost_peers(self._peer_name):
            group, tag = self._groups.forward, self.tags.tensor
            works = [started(dist.irecv(tensor, self._peer, group=group, tag=tag)) for tensor in tensors]
            for work in works:
                work.wait()
        return tensors
