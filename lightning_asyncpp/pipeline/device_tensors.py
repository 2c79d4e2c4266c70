"""Tensors on GPUs between neighbouring stages, over NCCL: from memory to memory, on the groups of the mesh."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.header import TensorInfo
from lightning_asyncpp.pipeline.memory_order import as_stored, empty
from lightning_asyncpp.pipeline.mesh import Groups, Mesh, started


class DeviceTensors:
    """Tensors of one stage with its two neighbours; what comes is known from headers, which travel on their own.

    Args:
        mesh: this rank's place; its groups have one for each direction to each neighbour.
        device: where the tensors live.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        assert mesh.groups is not None
        self.mesh, self.device = mesh, device
        self._groups: Groups = mesh.groups
        # What is sent must live until it is done.
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: dict[int, list[dist.Work]] = {}

    @classmethod
    def between(cls, mesh: Mesh, device: torch.device) -> DeviceTensors | None:
        """Such a transport where it can be used: tensors on a device, and groups between neighbours."""
        groups = mesh.groups
        if device.type == "cpu" or groups is None or (groups.forward is None and groups.to_next is None):
            return None
        return cls(mesh, device)

    def send_activation(self, tensors: list[Tensor]) -> None:
        """Send tensors to the stage after."""
        for tensor in tensors:
            self._send(tensor, self.mesh.rank_of(self.mesh.stage + 1), self._groups.to_next)

    def receive_activation(self, infos: tuple[TensorInfo, ...]) -> tuple[Tensor, ...]:
        """Return tensors that look as announced, from the stage before."""
        tensors = tuple(empty(info.shape, info.order, info.dtype, self.device) for info in infos)
        peer = self.mesh.rank_of(self.mesh.stage - 1)
        stored = [as_stored(tensor, info.order) for tensor, info in zip(tensors, infos)]
        for work in [started(dist.irecv(tensor, peer, group=self._groups.forward)) for tensor in stored]:
            work.wait()
        return tensors

    def send_gradients(self, gradients: list[Tensor]) -> None:
        """Send gradients to the stage before."""
        for gradient in gradients:
            self._send(gradient, self.mesh.rank_of(self.mesh.stage - 1), self._groups.backward)

    def post_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """Receive the gradients of micro-batch ``k`` into these tensors, contiguous ones, in the background."""
        peer = self.mesh.rank_of(self.mesh.stage + 1)
        group = self._groups.from_next
        self._posted[k] = [started(dist.irecv(gradient, peer, group=group)) for gradient in gradients]

    def wait_gradients(self, k: int) -> None:
        """Wait for the gradients of micro-batch ``k``."""
        for work in self._posted.pop(k):
            work.wait()

    def settle(self) -> None:
        """Wait for all sends and let go of their tensors."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()
        tensor = tensor.contiguous()
        self._sends.append((started(dist.isend(tensor, peer, group=group)), tensor))
