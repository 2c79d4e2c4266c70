"""Blocking collectives that raise alike on all ranks, and stop rounds of evaluations."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.host_copies import as_bytes
from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.errors import ConfigurationError, ConsequenceError, different_calls, lost_peers, raised_alike

T = TypeVar("T")
_MOST = 8  # differences that an error names
_REMEDY = "start all ranks with the same script, recipe and arguments"


class OtherStageFailedError(ConsequenceError):
    """Failure of a check on another rank, with that rank's error as the message."""


def all_gather_object(mesh: Mesh, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in the order of ranks; a blocking collective.

    Args:
        mesh: mesh of ranks.
        value: value of this rank, usually a string.
        group: gloo group of all ranks; default: the group of the training thread.

    Raises:
        ProtocolError: the values have different types, so ranks are in different calls.
    """
    if mesh.groups is None and group is None:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    with lost_peers():
        dist.all_gather_object(values, value, group=group or mesh.groups.host)  # type: ignore[union-attr]
    if len(types := {type(other).__name__ for other in values}) > 1:
        raise different_calls(f"they exchange values of the types {', '.join(sorted(types))}")
    return values


def broadcast(mesh: Mesh, value: T, source: int) -> T:
    """Return the value of rank ``source`` on all ranks; a blocking collective."""
    assert mesh.groups is not None
    values = [value]
    with lost_peers():
        dist.broadcast_object_list(values, source, group=mesh.groups.host)
    return values[0]


@torch.no_grad()
def copy_first_replica(mesh: Mesh, state_dict: Callable[[], Mapping[str, Tensor]]) -> None:
    """Overwrite a stage's tensors with replica 0's tensors of this stage; a blocking collective.

    Args:
        mesh: mesh of ranks.
        state_dict: function that returns the stage's name -> tensor; not called with one replica.
    """
    group = mesh.groups.data_parallel if mesh.groups is not None else None
    if group is None:
        return
    source = mesh.rank_of(mesh.stage, replica=0)
    for tensor in filter(torch.is_tensor, state_dict().values()):  # not the extra state of modules
        data = as_bytes(tensor)  # contiguous, as NCCL requires
        with lost_peers():
            dist.broadcast(data, source, group=group)
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def in_same_call(mesh: Mesh, call: str) -> None:
    """Wait until all ranks make the same call; a blocking collective.

    Args:
        mesh: mesh of ranks.
        call: what the call does, such as "ends the run".

    Raises:
        ProtocolError: another rank makes a different call.
    """
    calls = all_gather_object(mesh, call)
    if others := [f"rank {rank}" for rank, other in enumerate(calls) if other != call]:
        raise different_calls(f"this rank {call}, but not {', '.join(others)}")


def agree_on_problems(mesh: Mesh, problems: list[str]) -> None:
    """Raise one ConfigurationError with the distinct problems of all ranks, on every rank."""
    found: dict[str, None] = {}
    for text in all_gather_object(mesh, "\0".join(problems)):
        found.update(dict.fromkeys(part for part in text.split("\0") if part))
    if found:
        raise raised_alike(ConfigurationError.from_problems(list(found)), mesh.rank)


def agree_on_error(mesh: Mesh, error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """If any rank has an error, raise an error on every rank: the first of the following that applies.

    Raises:
        Exception: this rank's error, if it is no ConfigurationError.
        ConfigurationError: any rank has a ConfigurationError; the text has each distinct message once.
        OtherStageFailedError: this rank has no error; the text has the messages of the failed ranks.
    """
    config = isinstance(error, ConfigurationError)
    text = "" if error is None else f"{'C' if config else 'E'}{error if config else f'{type(error).__name__}: {error}'}"
    texts = all_gather_object(mesh, text, group)
    configuration = list(dict.fromkeys(t[1:] for t in texts if t.startswith("C")))
    others = [(rank, t[1:]) for rank, t in enumerate(texts) if t.startswith("E")]
    if error is not None and texts.count(text) == len(texts) > 1:  # > 1: a single rank just raises the error
        raise raised_alike(error, mesh.rank)
    if error is not None and (not config or configuration == [str(error)]):
        raise error  # with the traceback into the user's code
    if configuration:
        raise raised_alike(ConfigurationError.from_problems(configuration), mesh.rank) from error
    if others:
        quoted = "; ".join(f"{mesh.name_of(rank)}: {text}" for rank, text in others)
        raise OtherStageFailedError(quoted)


def call_and_agree(mesh: Mesh, function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call a function and return its result; an error on one rank is raised on all.

    Raises the errors of :func:`agree_on_error`.
    """
    error: Exception | None = None
    try:
        found = function()
    except Exception as caught:
        error = caught
    agree_on_error(mesh, error, group)
    return found


def compare_ranks(mesh: Mesh, entries: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Compare this rank's entries with those of rank 0; a blocking collective.

    Ranks exchange one hash each. They exchange the entries only if the hashes differ.

    Args:
        mesh: mesh of ranks.
        entries: name -> value as a string.
        group: gloo group of all ranks; needed before the mesh is connected.

    Raises:
        ConfigurationError: an entry differs; raised on every rank, with both values.
    """
    text = json.dumps(entries, sort_keys=True)
    if len(set(all_gather_object(mesh, hashlib.sha256(text.encode()).hexdigest(), group))) == 1:
        return
    first, *others = [json.loads(other) for other in all_gather_object(mesh, text, group)]
    differing: dict[str, str] = {}  # name -> problem with the first rank that differs
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if (expected := first.get(name, "missing")) != (found := other.get(name, "missing")):
                differing.setdefault(name, f"{name} is {expected} on rank 0 and {found} on rank {rank}")
    problems = list(differing.values())
    if len(problems) > _MOST:
        problems = [*problems[:_MOST], f"{len(problems) - _MOST} more differ"]
    raise raised_alike(ConfigurationError.from_problems(problems, _REMEDY), mesh.rank)


def batches_behind(num_stages: int, microbatches: int) -> int:
    """Return the number of batches after which stop flags are read: enough that no stage waits for later stages."""
    return 2 + (num_stages - 1) // microbatches


class StopRounds:
    """Agreement on an early end of an evaluation; in training, control messages carry the requests to stop.

    After every batch each rank contributes its flag to an asynchronous sum, and reads the sum from a few batches ago.
    All ranks read the same sum after the same batch, and so stop together. If replicas have different numbers of
    batches, ranks that have finished go on contributing flags until all ranks have finished. All ranks make the same
    calls in the same order.

    Args:
        mesh: mesh of ranks.
        behind: number of batches after which a sum is read.
    """

    def __init__(self, mesh: Mesh, behind: int) -> None:
        self.mesh, self.behind = mesh, behind
        self._pending: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._read = 0

    def after_batch(self, stop: bool) -> bool:
        """Contribute this rank's flag after a batch.

        Args:
            stop: whether this rank wants to stop.

        Returns:
            Whether all ranks stop now, because some rank asked for it ``behind`` batches ago.

        Raises:
            PeerLostError: a rank is gone.
        """
        self._give(stop, running=True)
        if len(self._pending) <= self.behind:
            return False
        agreed = self._take()[0]
        if agreed:
            self._finish_with(len(self._pending))
        return agreed

    def finish(self, stop: bool) -> bool:
        """Read the outstanding sums after this rank's last batch; wait for ranks with more batches.

        Args:
            stop: whether this rank wants to stop.

        Returns:
            Whether all ranks stop here, because some rank asked for it.

        Raises:
            PeerLostError: a rank is gone.
        """
        last: int | None = None
        while True:
            if not self._pending:
                self._give(stop, running=False)
            agreed, running = self._take()
            if agreed and last is None:
                last = self._read + self.behind  # number of sums that other ranks read before they stop
            if not running or self._read == last:
                self._finish_with(0)
                return last is not None

    def _give(self, stop: bool, running: bool) -> None:
        flags = torch.tensor([stop, running], dtype=torch.float64, device="cpu")
        work = None
        if self.mesh.groups is not None:
            with lost_peers():
                work = started(dist.all_reduce(flags, group=self.mesh.groups.host, async_op=True))
        self._pending.append((work, flags))

    def _take(self) -> tuple[bool, bool]:
        """Read the oldest pending sum; return whether any rank wants to stop, and whether any has more batches."""
        work, flags = self._pending.popleft()
        if work is not None:
            with lost_peers():
                work.wait()
        self._read += 1
        stop, running = flags.tolist()
        return stop > 0, running > 0

    def _finish_with(self, outstanding: int) -> None:
        for _ in range(outstanding):
            self._take()
        self._read = 0
