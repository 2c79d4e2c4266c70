"""Receives activations ahead of their use, so that what a stage needs next is there or already on its way.

A receive that is posted before its message is sent costs one hop; one that is posted after the header has been read
costs three more. The shapes of activations hardly ever change, so the tensors are received in advance too: they travel
as *usual* tensors if they look like the first ones that ever passed, under another tag if they do not. Both ends of a
link see the same headers in the same order, so they agree on what is usual without a word.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.header import LENGTH, Header, TensorInfo
from lightning_asyncpp.pipeline.mesh import Groups, Mesh, started

_AHEAD = 2
_KINDS = 4


class Tags(NamedTuple):
    """Message tags of one transport."""

    header: int
    usual: int
    unusual: int
    gradient: int

    @classmethod
    def of(cls, channel: int) -> Tags:
        """Tags of the ``channel``-th transport: what an earlier one left posted cannot take a message of this one."""
        return cls(*range((channel + 1) * 8, (channel + 1) * 8 + _KINDS))


class Usual:
    """What activations on one link look like as a rule: the first that passed. Each end keeps its own.

    Args:
        device: where the tensors live. Only on a CPU (gloo) may a receive stay posted that nobody ever sends to.
    """

    def __init__(self, device: torch.device) -> None:
        self._learns = device.type == "cpu"
        self.infos: tuple[TensorInfo, ...] = ()

    def matches(self, infos: tuple[TensorInfo, ...]) -> bool:
        """Whether tensors look as usual; the first ever do not, and say what is usual from then on."""
        if self.infos:
            return [(i.shape, i.dtype) for i in infos] == [(i.shape, i.dtype) for i in self.infos]
        if self._learns:
            self.infos = infos
        return False


class Arrival(NamedTuple):
    """An activation that arrived."""

    header: Header
    tensors: tuple[Tensor, ...]


class _Box(NamedTuple):
    """Tensors that are being received."""

    works: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


class Inbox:
    """Activations from the stage before, received by a small thread (a receive on gloo cannot be polled).

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
        self._usual = Usual(device)
        self._headers: deque[tuple[int, _Box]] = deque()
        self._boxes: deque[_Box] = deque()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Arrival | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def expect(self, ks: range) -> None:
        """Start receiving the activations of micro-batches ``ks``, in the background."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._receive_all, name="asyncpp-receiver", daemon=True)
            self._thread.start()
        for k in ks:
            self._wanted.put(k)

    def get(self) -> Arrival:
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

    def close(self) -> None:
        """End the receiving thread, once what was expected has arrived."""
        self._wanted.put(None)

    def _receive_all(self) -> None:
        try:
            while self._post_ahead():
                self._arrived.put(self._receive(*self._headers.popleft()))
        except Exception as error:
            self._arrived.put(error)

    def _post_ahead(self) -> bool:
        """Post receives for what is wanted next; waits for a wish only if nothing is posted. False at the end."""
        while len(self._headers) < _AHEAD:
            try:
                k = self._wanted.get(block=not self._headers)
            except queue.Empty:
                break
            if k is None:
                self._wanted.put(None)
                break
            with lost_peers(self._peer_name):
                self._headers.append((k, self._post_header()))
        while self._usual.infos and len(self._boxes) < len(self._headers):
            with lost_peers(self._peer_name):
                self._boxes.append(self._post(self._usual.infos, self.tags.usual))
        return bool(self._headers)

    def _receive(self, k: int, box: _Box) -> Arrival:
        with lost_peers(self._peer_name):
            (encoded,) = box.wait()
        header = Header.decode(encoded, k, self.max_message_bytes)
        if not header.tensors:
            return Arrival(header, ())
        with lost_peers(self._peer_name):
            usual = self._usual.matches(header.tensors)
            box = self._boxes.popleft() if usual else self._post(header.tensors, self.tags.unusual)
            return Arrival(header, box.wait())

    def _post_header(self) -> _Box:
        encoded = torch.empty(LENGTH, dtype=torch.int64)
        work = dist.irecv(encoded, self._peer, group=self._groups.host, tag=self.tags.header)
        return _Box([started(work)], (encoded,))

    def _post(self, infos: tuple[TensorInfo, ...], tag: int) -> _Box:
        tensors = tuple(torch.empty(info.shape, dtype=info.dtype, device=self.device) for info in infos)
        works = [started(dist.irecv(t, self._peer, group=self._groups.forward, tag=tag)) for t in tensors]
        return _Box(works, tensors)
