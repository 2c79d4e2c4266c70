"""Tensors on GPUs between neighbouring stages, over NCCL: from memory to memory, on the groups of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Groups, Mesh
from lightning_asyncpp.core.wire.handover import Inbox, Outbox, Way
from lightning_asyncpp.core.wire.header import TensorInfo
from lightning_asyncpp.core.wire.link import NO_TIMEOUT, connect_neighbours
from lightning_asyncpp.errors import ProtocolError


class DeviceTensors:
    """Tensors of one stage with its two neighbours. Making one is a collective call.

    What comes, and that it can be taken, is known from headers and frames, which travel on their own.

    Args:
        mesh: this rank's place; its groups have one for each direction to each neighbour.
        device: where the tensors live.
        timeout: seconds that a wait for a neighbour may take; default: half an hour.

    Raises:
        ProtocolError: what a neighbour sent to try the way did not arrive.
    """

    def __init__(self, mesh: Mesh, device: torch.device, timeout: float | None = None) -> None:
        assert mesh.groups is not None
        groups: Groups = mesh.groups
        self.mesh, self.device = mesh, device
        activations = connect_neighbours(mesh, before=timeout, after=NO_TIMEOUT)
        gradients = connect_neighbours(mesh, before=NO_TIMEOUT, after=timeout)
        self._to_next = self._from_next = self._to_before = self._from_before = None
        ways: list[tuple[Way, Way] | None] = [None, None]  # there and back: to the stage before, to the stage after
        if activations.before is not None and gradients.before is not None:
            peer = mesh.rank_of(mesh.stage - 1)
            back, there = Way.to(peer, groups.backward, device), Way.to(peer, groups.forward, device)
            self._to_before, self._from_before = Outbox(back, gradients.before), Inbox(there, activations.before)
            ways[0] = back, there
        if activations.after is not None and gradients.after is not None:
            peer = mesh.rank_of(mesh.stage + 1)
            there, back = Way.to(peer, groups.to_next, device), Way.to(peer, groups.from_next, device)
            self._to_next, self._from_next = Outbox(there, activations.after), Inbox(back, gradients.after)
            ways[1] = there, back
        self._try(*ways)

    @classmethod
    def between(cls, mesh: Mesh, device: torch.device, timeout: float | None = None) -> DeviceTensors | None:
        """Such a transport where it can be used: where there are groups between neighbours."""
        groups = mesh.groups
        if groups is None or (groups.forward is None and groups.to_next is None):
            return None
        return cls(mesh, device, timeout)

    def put_activation(self, tensors: Sequence[Tensor]) -> None:
        """Let the stage after take tensors; to be announced when this has returned."""
        assert self._to_next is not None, "nothing comes after the last stage"
        self._to_next.put(tensors)

    def take_activation(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Take tensors of the stage before, which has announced them."""
        assert self._from_before is not None, "nothing comes before the first stage"
        return self._from_before.take(infos)

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Let the stage before take gradients; to be announced when this has returned."""
        assert self._to_before is not None, "nothing comes before the first stage"
        self._to_before.put(gradients)

    def take_gradients(self, infos: Sequence[TensorInfo]) -> list[Tensor]:
        """Take gradients of the stage after, which has announced them."""
        assert self._from_next is not None, "nothing comes after the last stage"
        return self._from_next.take(infos)

    def wait_for_stage_after(self, limit: int) -> None:
        """Wait until the stage after has taken all but ``limit`` activations."""
        if self._to_next is not None:
            self._to_next.wait_until_taken(limit)

    def settle(self) -> None:
        """Wait until everything is taken, and let go of it when it has been sent."""
        for outbox in (self._to_before, self._to_next):
            if outbox is not None:
                outbox.settle()

    def close(self) -> None:
        """End the connections, from any thread: nobody takes anything any more."""
        for end in self._ends():
            end.close()

    def _ends(self) -> Iterator[Outbox | Inbox]:
        for end in (self._to_before, self._to_next, self._from_before, self._from_next):
            if end is not None:
                yield end

    def _try(self, before: tuple[Way, Way] | None, after: tuple[Way, Way] | None) -> None:
        """Send a number each way: NCCL connects two ranks at their first message, and their hosts wait for each other.

        First the pairs that begin with an even stage, then the others: so everybody has one partner at a time.
        """
        stage = self.mesh.stage
        number = torch.full((1,), stage, device=self.device, dtype=torch.float32)
        for parity in (0, 1):
            begins = stage % 2 == parity
            if (ways := after if begins else before) is None:
                continue
            there, back = ways
            sends = there.send([number], there.mark()) if begins else []
            infos = [TensorInfo.of(number)]
            (heard,) = back.receive(infos, back.allocate(infos))
            sends += [] if begins else there.send([number], there.mark())
            for work in sends:
                work.wait()
            peer = stage + 1 if begins else stage - 1
            if (said := heard.item()) != peer:
                raise ProtocolError(f"{self.mesh.name_of(peer)} sent {peer} between the devices, and {said} arrived")
