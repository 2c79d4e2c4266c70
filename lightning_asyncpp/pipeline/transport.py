"""Activations forward, their gradients backward, between the neighbours of a pipeline.

Nothing is waited for in the hot path but what is needed next: sends are asynchronous and kept until they are known to
be done, gradients have their receives posted when the activation leaves, and a small thread receives activations ahead
(a receive on gloo cannot be polled).
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.header import LENGTH, Header
from lightning_asyncpp.pipeline.mesh import Groups, Mesh

_TAG_HEADER, _TAG_ACTIVATION, _TAG_GRADIENT = 1, 2, 3


class Arrival(NamedTuple):
    """An activation that arrived."""

    header: Header
    tensors: tuple[Tensor, ...]


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
        self.device = device
        self.max_message_bytes = max_message_bytes
        # (micro-batch, work, tensor): a tensor must live until its send is done
        self._activations: deque[tuple[int, dist.Work, Tensor]] = deque()
        self._gradients: deque[tuple[int, dist.Work, Tensor]] = deque()
        self._posted: dict[int, _Posted] = {}
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Arrival | Exception] = queue.SimpleQueue()
        self._receiver: threading.Thread | None = None

    def expect(self, ks: range) -> None:
        """Start receiving the activations of micro-batches ``ks``, in the background."""
        if self._receiver is None:
            self._receiver = threading.Thread(target=self._receive_all, name="asyncpp-receiver", daemon=True)
            self._receiver.start()
        for k in ks:
            self._wanted.put(k)

    def receive_activation(self) -> Arrival:
        """Return the next expected activation, waiting for it if need be.

        Raises:
            PeerLostError: the stage before is gone.
            ProtocolError: what came is not what was agreed on.
        """
        arrival = self._arrived.get()
        if isinstance(arrival, Exception):
            self._arrived.put(arrival)  # nothing comes after it: whoever asks again hears the same
            raise arrival
        return arrival

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Send an activation, or the header alone, to the stage after."""
        groups, peer = self._groups, self.mesh.rank_of(self.mesh.stage + 1)
        work = self._send(header.encode(), peer, groups.host, _TAG_HEADER)
        self._activations.append((header.k, *work))
        for tensor in tensors:
            work = self._send(tensor.detach().contiguous(), peer, groups.to_next, _TAG_ACTIVATION)
            self._activations.append((header.k, *work))

    def post_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> None:
        """Post the receives of the gradients of ``outputs`` (those that need one) from the stage after."""
        peer = self.mesh.rank_of(self.mesh.stage + 1)
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs if t.requires_grad]
        with self._peer(self.mesh.stage + 1):
            works = [
                _work(dist.irecv(gradient, peer, group=self._groups.from_next, tag=_TAG_GRADIENT))
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
            work = self._send(gradient.contiguous(), peer, self._groups.backward, _TAG_GRADIENT)
            self._gradients.append((k, *work))

    def settle(self, activations: float = math.inf, gradients: float = math.inf) -> None:
        """Wait for sends and let go of their tensors.

        Args:
            activations: of micro-batches up to this one.
            gradients: likewise.
        """
        for sends, last in ((self._activations, activations), (self._gradients, gradients)):
            while sends and sends[0][0] <= last:
                _, work, _ = sends.popleft()
                with lost_peers("a neighbour"):
                    work.wait()

    def close(self) -> None:
        """End the receiving thread, once what was expected has arrived."""
        self._wanted.put(None)

    @property
    def _groups(self) -> Groups:
        assert self.mesh.groups is not None, "a transport needs a connected mesh"
        return self.mesh.groups

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> tuple[dist.Work, Tensor]:
        with lost_peers(f"rank {peer}"):
            return _work(dist.isend(tensor, peer, group=group, tag=tag)), tensor

    def _peer(self, stage: int) -> AbstractContextManager[None]:
        return lost_peers(f"rank {self.mesh.rank_of(stage)} (stage {stage})")

    def _receive_all(self) -> None:
        while True:
            k = self._wanted.get()
            if k is None:
                return
            try:
                self._arrived.put(self._receive(k))
            except Exception as error:
                self._arrived.put(error)
                return

    def _receive(self, k: int) -> Arrival:
        peer, stage = self.mesh.rank_of(self.mesh.stage - 1), self.mesh.stage - 1
        encoded = torch.empty(LENGTH, dtype=torch.int64)
        with self._peer(stage):
            _work(dist.irecv(encoded, peer, group=self._groups.host, tag=_TAG_HEADER)).wait()
        header = Header.decode(encoded, k, self.max_message_bytes)
        tensors = tuple(torch.empty(i.shape, dtype=i.dtype, device=self.device) for i in header.tensors)
        with self._peer(stage):
            works = [
                _work(dist.irecv(tensor, peer, group=self._groups.forward, tag=_TAG_ACTIVATION)) for tensor in tensors
            ]
            for work in works:
                work.wait()
        return Arrival(header, tensors)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
