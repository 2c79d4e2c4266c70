"""Messages between stages of one process: queues of tensors, in the order of sending."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostCopy
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.link import Header, TensorInfo, memory_of, written_out
from lightning_asyncpp.core.wire.transport import Arrival, Transport

_OLD = 8  # mini-batches after which no stage reads a control message any more


class Mailbox:
    """Messages in flight between the stages of one process.

    Args:
        num_stages: number of stages P.

    Attributes:
        activations: for each stage, activations from the previous stage.
        gradients: for each stage, gradients from the next stage.
        partial_sums: (stage, mini-batch) -> sum of the control messages (:class:`.PipelineSum`) of all later stages.
        totals: mini-batch -> sum of the control messages of all stages.
        arrived: (from rank, to rank, tag) -> messages whose receives are not posted yet.
        awaited: (from rank, to rank, tag) -> receives whose messages are not sent yet.
    """

    def __init__(self, num_stages: int) -> None:
        self.activations: list[deque[Arrival]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[list[Tensor]]] = [deque() for _ in range(num_stages)]
        self.partial_sums: dict[tuple[int, int], Tensor] = {}
        self.totals: dict[int, Tensor] = {}
        self.arrived: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.awaited: defaultdict[tuple[int, int, int], deque[LocalWork]] = defaultdict(deque)


class LocalWork:
    """Message from one stage to another, with the interface of ``torch.distributed``'s ``Work``.

    Args:
        room: tensor that receives the message.
        is_there: whether the message has been delivered.
    """

    def __init__(self, room: Tensor, is_there: bool = False) -> None:
        self._room = room
        self._is_there = is_there

    def put(self, tensor: Tensor) -> None:
        """Deliver the message."""
        self._room.copy_(tensor)
        self._is_there = True

    def is_completed(self) -> bool:
        """Return whether the message has been delivered."""
        return self._is_there

    def wait(self) -> None:
        """Check that the message has been delivered.

        Raises:
            RuntimeError: the message has not been delivered. No other stage can run during a wait, so the wait would
                never end.
        """
        if not self._is_there:
            raise RuntimeError("a stage of this process waits for a message that no other stage has sent")


class LocalMesh(Mesh):
    """Mesh of the stages of this process, as seen by one of them.

    Args:
        mailbox: mailbox of all stages.
        num_stages: number of stages P.
        stage: index of this stage.
    """

    def __init__(self, mailbox: Mailbox, num_stages: int, stage: int) -> None:
        super().__init__(num_stages, 1, num_stages - 1 - stage)
        self._mailbox = mailbox

    def send(self, copy: HostCopy, rank: int, tag: int) -> Any:
        """Send the host copy of a tensor to a rank."""
        key, tensor = (self.rank, rank, tag), copy.wait()
        if self._mailbox.awaited[key]:
            self._mailbox.awaited[key].popleft().put(tensor)
        else:
            self._mailbox.arrived[key].append(tensor.clone())
        return LocalWork(tensor, is_there=True)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Post a receive from a rank."""
        key, work = (rank, self.rank, tag), LocalWork(tensor)
        if self._mailbox.arrived[key]:
            work.put(self._mailbox.arrived[key].popleft())
        else:
            self._mailbox.awaited[key].append(work)
        return work


class LocalTransport(Transport):
    """Transport between one stage and its neighbours in this process.

    Received tensors are copies, since a layer may change its input in place.

    Args:
        mailbox: mailbox of all stages.
        stage: index of this stage.
        device: device of all stages.
    """

    is_local = True

    def __init__(self, mailbox: Mailbox, stage: int, device: torch.device) -> None:
        # Replaces Transport.__init__. Without links, what only other processes must know is told to nobody.
        self._mailbox, self._stage, self.device = mailbox, stage, device
        self._prev = self._next = self._direct = None
        self._closed, self._drops = False, deque(maxlen=0)

    def send_forward(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Send an activation, or only a header, to the next stage."""
        copies = []
        for tensor, info in zip(tensors, header.layout.tensors):
            copies.append(info.empty(self.device))
            copies[-1].copy_(tensor.detach())
        self._mailbox.activations[self._stage + 1].append(Arrival(header, tuple(copies)))

    def recv_forward(self, k: int) -> Arrival:
        """Return the activation of microbatch ``k``, the next in order."""
        arrival = self._mailbox.activations[self._stage].popleft()
        assert arrival.header.k == k
        return arrival

    def recv_backward(self, k: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of microbatch ``k`` in the memory layout of ``outputs``."""
        gradients = []
        for output, stored in zip(outputs, self._mailbox.gradients[self._stage].popleft()):
            info = TensorInfo.of(output)
            gradients.append(info.empty(self.device))
            memory_of(gradients[-1]).copy_(memory_of(written_out(stored)))
        return gradients

    def send_backward(self, k: int, gradients: list[Tensor]) -> None:
        """Send the gradients of microbatch ``k`` to the previous stage."""
        self._mailbox.gradients[self._stage - 1].append(gradients)

    def send_partial_sum(self, mini_batch: int, vector: Tensor) -> None:
        """Send the sum of the control messages of this and all later stages to the previous stage."""
        self._mailbox.partial_sums[self._stage - 1, mini_batch] = vector

    def has_partial_sum(self, mini_batch: int) -> bool:
        """Return whether the sum of the control messages of the later stages has arrived."""
        return (self._stage, mini_batch) in self._mailbox.partial_sums

    def receive_partial_sum(self, mini_batch: int) -> Tensor:
        """Return the sum of the control messages of the later stages."""
        return self._mailbox.partial_sums.pop((self._stage, mini_batch))

    def send_total(self, mini_batch: int, vector: Tensor) -> None:
        """Send the sum of the control messages of all stages to all stages."""
        self._mailbox.totals[mini_batch] = vector
        self._mailbox.totals.pop(mini_batch - _OLD, None)

    def receive_total(self, mini_batch: int) -> Tensor:
        """Return the sum of the control messages of all stages."""
        return self._mailbox.totals[mini_batch]
