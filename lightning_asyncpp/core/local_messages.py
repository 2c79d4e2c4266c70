"""Messages between stages of one process: tensors that change hands, in the order in which they were sent."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostCopy
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.link import Header, TensorInfo
from lightning_asyncpp.core.wire.transport import Arrival, Transport

_OLD = 8  # mini-batches after which nobody asks for a control message any more


class Mailbox:
    """Messages in flight between the stages of one process.

    Args:
        num_stages: number of stages P.

    Attributes:
        activations: for each stage, from the stage before.
        gradients: for each stage, from the stage after.
        parts: (stage, mini-batch) -> what the stages behind it have summed up.
        totals: mini-batch -> the sum of the control messages of all stages.
        arrived, awaited: (from rank, to rank, tag) -> what was sent and not asked for, or asked for and not sent.
    """

    def __init__(self, num_stages: int) -> None:
        self.activations: list[deque[Arrival]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[list[Tensor]]] = [deque() for _ in range(num_stages)]
        self.parts: dict[tuple[int, int], Tensor] = {}
        self.totals: dict[int, Tensor] = {}
        self.arrived: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.awaited: defaultdict[tuple[int, int, int], deque[Letter]] = defaultdict(deque)


class Letter:
    """A tensor that one stage sends another; takes the place of ``torch.distributed``'s ``Work``.

    Args:
        room: where it goes.
    """

    def __init__(self, room: Tensor) -> None:
        self._room = room
        self._is_there = False

    def put(self, tensor: Tensor) -> None:
        """Fill the room."""
        self._room.copy_(tensor)
        self._is_there = True

    def is_completed(self) -> bool:
        """Return whether the message is there."""
        return self._is_there

    def wait(self) -> None:
        """Do nothing if it is there.

        Raises:
            RuntimeError: it is not, and nobody else runs meanwhile.
        """
        if not self._is_there:
            raise RuntimeError("a stage of this process waits for a message that no other one has sent")


class LocalMesh(Mesh):
    """The place of a stage among those of this process.

    Args:
        mailbox: of all stages.
        num_stages: number of stages P.
        stage: this one, 0 first.
    """

    def __init__(self, mailbox: Mailbox, num_stages: int, stage: int) -> None:
        super().__init__(num_stages, 1, num_stages - 1 - stage)
        self._mailbox = mailbox

    def send(self, copy: HostCopy, rank: int, tag: int) -> Any:
        """Send what is on the host, or on its way there, to a rank."""
        key, tensor = (self.rank, rank, tag), copy.wait()
        if self._mailbox.awaited[key]:
            self._mailbox.awaited[key].popleft().put(tensor)
        else:
            self._mailbox.arrived[key].append(tensor.clone())
        sent = Letter(torch.empty_like(tensor))
        sent.put(tensor)
        return sent

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Ask for what a rank sends."""
        key, letter = (rank, self.rank, tag), Letter(tensor)
        if self._mailbox.arrived[key]:
            letter.put(self._mailbox.arrived[key].popleft())
        else:
            self._mailbox.awaited[key].append(letter)
        return letter


class LocalTransport(Transport):
    """Messages of one stage with its two neighbours in this process.

    What is received is a copy, as it is over a wire: a layer may change its input in place.

    Args:
        mailbox: of all stages.
        stage: this one, 0 first.
        device: where tensors live.
    """

    is_local = True

    def __init__(self, mailbox: Mailbox, stage: int, device: torch.device) -> None:
        self._mailbox, self._stage, self.device = mailbox, stage, device

    @property
    def route(self) -> str:
        """Description of how tensors travel."""
        return "within this process"

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Hand an activation, or the header alone, to the stage after."""
        copies = []
        for tensor, info in zip(tensors, header.tensors):
            copies.append(info.empty(self.device))
            copies[-1].copy_(tensor.detach())
        self._mailbox.activations[self._stage + 1].append(Arrival(header, tuple(copies)))

    def receive_activation(self, k: int) -> Arrival:
        """Return the activation of microbatch ``k``, the next one."""
        arrival = self._mailbox.activations[self._stage].popleft()
        assert arrival.header.k == k
        return arrival

    def receive_gradients(self, k: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of microbatch ``k``, laid out in memory as ``outputs`` are."""
        gradients = []
        for output, stored in zip(outputs, self._mailbox.gradients[self._stage].popleft()):
            info = TensorInfo.of(output)
            gradients.append(info.empty(self.device))
            info.stored(gradients[-1]).copy_(stored)
        return gradients

    def send_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """Hand the gradients of microbatch ``k`` to the stage before."""
        self._mailbox.gradients[self._stage - 1].append(gradients)

    def send_part(self, mini_batch: int, vector: Tensor) -> None:
        """Hand what this stage and those behind it have summed up to the stage before."""
        self._mailbox.parts[self._stage - 1, mini_batch] = vector

    def has_part(self, mini_batch: int) -> bool:
        """Return whether the later stages have summed up their parts."""
        return (self._stage, mini_batch) in self._mailbox.parts

    def receive_part(self, mini_batch: int, length: int) -> Tensor:
        """Return what the stages behind have summed up."""
        return self._mailbox.parts.pop((self._stage, mini_batch))

    def send_total(self, mini_batch: int, vector: Tensor) -> None:
        """Let all stages have the sum."""
        self._mailbox.totals[mini_batch] = vector
        self._mailbox.totals.pop(mini_batch - _OLD, None)

    def receive_total(self, mini_batch: int, length: int) -> Tensor:
        """Return the sum of all stages."""
        return self._mailbox.totals[mini_batch]

    def announce_drop(self, k: int) -> None:
        """Do nothing: the stages of a process decide together."""

    def announce_end(self) -> None:
        """Do nothing: the other stages are called for the same."""

    def expect_end(self) -> None:
        """Do nothing: see :meth:`announce_end`."""

    def settle(self) -> None:
        """Do nothing: tensors are handed over at once."""

    def close(self) -> None:
        """Do nothing: there is no connection."""
