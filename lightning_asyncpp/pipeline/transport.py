"""Activations forward, their gradients backward, between the neighbours of a pipeline.

Nothing is waited for in the hot path but what is needed next: sends are asynchronous and kept until they are known to
be done, gradients have their receives posted when the activation leaves, activations are received ahead.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.header import Header
from lightning_asyncpp.pipeline.inbox import Arrival, Inbox, Tags
from lightning_asyncpp.pipeline.mesh import Groups, Mesh, started
from lightning_asyncpp.pipeline.parcel import Envelope, Parcels


class _Posted(NamedTuple):
    """Receives of the gradients of one activation, in the order of the tensors that need one."""

    works: list[dist.Work]
    gradients: list[Tensor]


class Transport:
    """Point-to-point messages of one stage with its two neighbours.

    Args:
        mesh: this rank's place; its groups are connected.
        device: where tensors live.
        max_message_bytes: largest activation that is accepted, in bytes.
    """

    def __init__(self, mesh: Mesh, device: torch.device, max_message_bytes: int) -> None:
        self.mesh = mesh
        self.tags = Tags.of(self._groups.next_channel())
        # (number of the message, or micro-batch of the gradient; work; what is sent, which must live until it is done)
        self._activations: deque[tuple[int, dist.Work, Tensor | Envelope]] = deque()
        self._gradients: deque[tuple[int, dist.Work, Tensor | Envelope]] = deque()
        self.activations_sent = 0
        self._posted: dict[int, _Posted] = {}
        self._parcels = Parcels(device)
        self._inbox = None if mesh.is_first else Inbox(mesh, device, max_message_bytes, self.tags)

    def receive_activation(self, k: int) -> Arrival:
        """Return the activation of micro-batch ``k``, the next to come, waiting for it; not on the first stage.

        Raises:
            PeerLostError: the stage before is gone.
            ProtocolError: what came is not what was agreed on.
        """
        assert self._inbox is not None, "nothing comes before the first stage"
        return self._inbox.get(k)

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> int:
        """Send an activation, or the header alone, to the stage after; return the number of the message, from 0."""
        groups, peer = self._groups, self.mesh.rank_of(self.mesh.stage + 1)
        tensors = tuple(tensor.detach() for tensor in tensors)
        number = self.activations_sent
        self.activations_sent += 1
        inside = self._parcels.holds(number, header.tensors)
        envelope = self._parcels.pack(number, header, tensors if inside else ())
        work = self._send(envelope.message, peer, groups.host, self.tags.message)
        self._activations.append((number, work, envelope))
        self._parcels.learn(number, header.tensors)
        if not inside:
            for tensor in tensors:
                tensor = tensor.contiguous()
                work = self._send(tensor, peer, groups.to_next, self.tags.tensor)
                self._activations.append((number, work, tensor))
        return number

    def post_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> None:
        """Post the receives of the gradients of ``outputs`` (those that need one) from the stage after."""
        peer = self.mesh.rank_of(self.mesh.stage + 1)
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs if t.requires_grad]
        with self._peer(self.mesh.stage + 1):
            works = [
                started(dist.irecv(gradient, peer, group=self._groups.from_next, tag=self.tags.gradient))
                for gradient in gradients
            ]
        self._posted[k] = _Posted(works, gradients)

    def receive_gradients(self, k: int) -> list[Tensor]:
        """Return the gradients of micro-batch ``k`` in the order of the outputs that need one."""
        posted = self._posted.pop(k)
        with self._peer(self.mesh.stage + 1):
            for work in posted.works:
                work.wait()
        return posted.gradients

    def send_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """Send the gradients of micro-batch ``k`` to the stage before."""
        peer = self.mesh.rank_of(self.mesh.stage - 1)
        for gradient in gradients:
            gradient = gradient.contiguous()
            work = self._send(gradient, peer, self._groups.backward, self.tags.gradient)
            self._gradients.append((k, work, gradient))

    def settle(self, activations: float = math.inf, gradients: float = math.inf) -> None:
        """Wait for sends and let go of their tensors.

        Args:
            activations: with message numbers up to this one.
            gradients: of micro-batches up to this one.
        """
        for sends, last in ((self._activations, activations), (self._gradients, gradients)):
            while sends and sends[0][0] <= last:
                _, work, sent = sends.popleft()
                with lost_peers("a neighbour"):
                    work.wait()
                if isinstance(sent, Envelope):
                    self._parcels.reuse(sent)

    @property
    def _groups(self) -> Groups:
        assert self.mesh.groups is not None, "a transport needs a connected mesh"
        return self.mesh.groups

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> dist.Work:
        with lost_peers(f"rank {peer}"):
            return started(dist.isend(tensor, peer, group=group, tag=tag))

    def _peer(self, stage: int) -> AbstractContextManager[None]:
        return lost_peers(f"rank {self.mesh.rank_of(stage)} (stage {stage})")
