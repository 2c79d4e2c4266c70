"""All stages of a pipeline in one process, for checks: a thread each, of which one runs at a time.

Everything is what it is in a real run, the engine, the schedule and the messages, but for the process groups: there are
none. A stage runs until it waits for a neighbour; then another one goes on. So torch's generators, which are the
process's, are those of the stage that runs, and errors come from where they happen, in this process.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostCopy
from lightning_asyncpp.core.randomness import generator_states, preserved_generators, set_generator_states
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.link import Link, Neighbours
from lightning_asyncpp.errors import PeerLostError

T = TypeVar("T")
_PAUSE_SECONDS = 1e-3


class Turns:
    """Lets one thread at a time run, with torch's generators as it left them.

    Args:
        device: whose generators, beside those of the CPU.

    Attributes:
        boxes: (from rank, to rank, tag) -> messages.
        failed: whether a stage ended with an error.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.boxes: defaultdict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        self.failed = False
        self._turn = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run when it is this thread's turn."""
        with self._turn:
            yield

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """Let others run while this thread waits for one of them."""
        states = generator_states(self.device)
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            set_generator_states(states, self.device)


class _Mail:
    """A message between two stages that need not be neighbours; what torch.distributed's ``Work`` is otherwise.

    Args:
        box: the messages from the one to the other, in the order in which they were sent.
        number: which of them it is.
        room: where it goes.
    """

    def __init__(self, box: list[Tensor], number: int, room: Tensor, turns: Turns) -> None:
        self._box, self._number, self._room, self._turns = box, number, room, turns

    def is_completed(self) -> bool:
        """Whether it was sent."""
        return len(self._box) > self._number

    def wait(self) -> None:
        """Take it, letting others run until it is there."""
        while not self.is_completed():
            if self._turns.failed:
                raise PeerLostError("another stage failed")
            with self._turns.given_away():
                time.sleep(_PAUSE_SECONDS)
        self._room.copy_(self._box[self._number])


class _MeshInTurns(Mesh):
    """A stage's place among threads."""

    def __init__(self, num_stages: int, stage: int, turns: Turns) -> None:
        super().__init__(num_stages, 1, num_stages - 1 - stage)
        self._turns = turns
        self._received: Counter[tuple[int, int]] = Counter()

    def send(self, copy: HostCopy, rank: int, tag: int) -> Any:
        box, tensor = self._turns.boxes[self.rank, rank, tag], copy.wait()
        box.append(tensor.clone())
        return _Mail(box, len(box) - 1, tensor, self._turns)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        number = self._received[rank, tag]
        self._received[rank, tag] += 1
        return _Mail(self._turns.boxes[rank, self.rank, tag], number, tensor, self._turns)


class _LinkInTurns(Link):
    """A connection between two threads."""

    def __init__(self, connection: socket.socket, peer: str, turns: Turns) -> None:
        super().__init__(connection, peer)
        self._turns = turns

    def _receive(self, view: memoryview) -> int:
        with self._turns.given_away():
            return super()._receive(view)


def run_in_turns(num_stages: int, work: Callable[[Mesh, Neighbours], T], device: torch.device) -> list[T]:
    """Run every stage of a pipeline of one replica.

    Args:
        num_stages: number of stages P.
        work: what a stage does, given its place, whose process groups are not connected, and its neighbours.
        device: where its tensors live.

    Returns:
        What ``work`` returned on each stage, the first stage first.

    Raises:
        BaseException: the first error of any stage.
    """
    turns = Turns(device)
    num_threads = torch.get_num_threads()
    meshes = [_MeshInTurns(num_stages, stage, turns) for stage in range(num_stages)]
    neighbours = _connected(meshes, turns)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(stage: int) -> None:
        # A new thread has OpenMP's default until then, with which some kernels (oneDNN's) round otherwise.
        torch.set_num_threads(num_threads)
        with turns.taken():
            try:
                results[stage] = work(meshes[stage], neighbours[stage])
            except BaseException as error:
                errors.append(error)  # those of the others, whose neighbour is gone, come later
                turns.failed = True
                for link in neighbours[stage]:
                    if link is not None:
                        link.hang_up()

    threads = [threading.Thread(target=run, args=(stage,), daemon=True) for stage in range(num_stages)]
    with preserved_generators(device):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for link in (link for pair in neighbours for link in pair if link is not None):
        link.close()
    if errors:
        raise errors[0]
    return [results[stage] for stage in range(num_stages)]


def _connected(meshes: Sequence[Mesh], turns: Turns) -> list[Neighbours]:
    pairs = [socket.socketpair() for _ in meshes[1:]]
    names = [mesh.name_of(mesh.stage) for mesh in meshes]
    before = [None, *(_LinkInTurns(there, name, turns) for (_, there), name in zip(pairs, names))]
    after = [*(_LinkInTurns(here, name, turns) for (here, _), name in zip(pairs, names[1:])), None]
    return [Neighbours(*ends) for ends in zip(before, after)]
