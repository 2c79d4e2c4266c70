"""Activations forward, their gradients backward, between the neighbours of a pipeline.

Nothing is waited for in the hot path but what is needed next: sends are asynchronous and kept until they are known to
be done, gradients have their receives posted when the activation leaves, and a small thread receives activations ahead
(a receive on gloo cannot be polled).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import PeerLostError
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
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: dict[int, _Posted] = {}
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
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
            raise arrival
        return arrival

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Send an activation, or the header alone, to the stage after."""
        groups, peer = self._groups, self.mesh.rank_of(self.mesh.stage + 1)
        self._send(header.encode(), peer, groups.host, _TAG_HEADER)
        for tensor in tensors:
            self._send(tensor.detach().contiguous(), peer, groups.to_next, _TAG_ACTIVATION)

    def post_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> None:
        """Post the receives of the gradients of ``outputs`` (those that need one) from the stage after."""
        peer = self.mesh.rank_of(self.mesh.stage + 1)
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs if t.requires_grad]
        with _peer_errors(peer, self.mesh.stage + 1):
            works = [
                _work(dist.irecv(gradient, peer, group=self._groups.from_next, tag=_TAG_GRADIENT))
                for gradient in gradients
            ]
        self._posted[k] = _Posted(works, gradients)

    def receive_gradients(self, k: int) -> list[Tensor]:
        """Return the gradients of micro-batch ``k`` in the order of the outputs that need one."""
        posted = self._posted.pop(k)
        with _peer_errors(self.mesh.rank_of(self.mesh.stage + 1), self.mesh.stage + 1):
            for work in posted.works:
                work.wait()
        return posted.gradients

    def send_gradients(self, gradients: list[Tensor]) -> None:
        """Send gradients to the stage before."""
        peer = self.mesh.rank_of(self.mesh.stage - 1)
        for gradient in gradients:
            self._send(gradient.contiguous(), peer, self._groups.backward, _TAG_GRADIENT)

    def settle(self, keep: int = 0) -> None:
        """Wait for all but the newest ``keep`` sends, and let go of their tensors."""
        while len(self._sends) > keep:
            work, _ = self._sends.popleft()
            with _peer_errors(None, None):
                work.wait()

    @property
    def _groups(self) -> Groups:
        assert self.mesh.groups is not None, "a transport needs a connected mesh"
        return self.mesh.groups

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> None:
        with _peer_errors(peer, None):
            self._sends.append((_work(dist.isend(tensor, peer, group=group, tag=tag)), tensor))

    def _receive_all(self) -> None:
        while True:
            k = self._wanted.get()
            try:
                self._arrived.put(self._receive(k))
            except Exception as error:
                self._arrived.put(error)
                return

    def _receive(self, k: int) -> Arrival:
        peer, stage = self.mesh.rank_of(self.mesh.stage - 1), self.mesh.stage - 1
        encoded = torch.empty(LENGTH, dtype=torch.int64)
        with _peer_errors(peer, stage):
            _work(dist.irecv(encoded, peer, group=self._groups.host, tag=_TAG_HEADER)).wait()
        header = Header.decode(encoded, k, self.max_message_bytes)
        tensors = tuple(torch.empty(i.shape, dtype=i.dtype, device=self.device) for i in header.tensors)
        with _peer_errors(peer, stage):
            works = [
                _work(dist.irecv(tensor, peer, group=self._groups.forward, tag=_TAG_ACTIVATION)) for tensor in tensors
            ]
            for work in works:
                work.wait()
        return Arrival(header, tensors)


class _peer_errors:  # noqa: N801  (a context manager, used like a function)
    """Translate the errors of a broken connection into one that says who is gone."""

    def __init__(self, peer: int | None, stage: int | None) -> None:
        self.who = "a neighbour" if peer is None else f"rank {peer}" + ("" if stage is None else f" (stage {stage})")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and issubclass(kind, RuntimeError):
            raise PeerLostError(
                f"{self.who} is gone: the first cause is the first error that another rank printed ({error})"
            ) from error


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
