"""Process groups: their creation, and messages of host data.

With NCCL and a default group that is bound to a device, creating a group splits the communicator of all ranks, and all
ranks must take part. One split creates several disjoint groups. NCCL refuses several ranks on one GPU.

With gloo, ``is_completed()`` of ``isend`` and ``irecv`` stays false until ``wait()`` is called. Polling would never see
that a message has arrived or was sent. Therefore a thread waits for each message.

torchrun's agent keeps one key-value store for all attempts. After a restart, torch would find the addresses of ended
processes in the store, and wait for these processes (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_asyncpp.core import background

_MOST_CTAS = 4
"""Maximum number of thread blocks (cooperative thread arrays) of NCCL's kernel for a message between neighbours."""


def new_group(
    timeout: timedelta | None,
    ranks: Sequence[int] | None = None,
    backend: str | None = None,
    options: Callable[[], Any] | None = None,
) -> dist.ProcessGroup:
    """Create a group; a collective call of all ranks.

    Args:
        timeout: timeout of blocking communication; default: torch's.
        ranks: ranks of the group; default: all.
        backend: backend of the group; default: the default group's backend.
        options: function that returns a new object with NCCL's options, since NCCL changes the object; ignored with
            other backends.
    """
    given = options() if options is not None and dist.get_backend() == "nccl" else None
    members = None if ranks is None else list(ranks)
    group = dist.new_group(members, timeout=timeout, backend=backend, pg_options=given)
    # Ranks outside of the group get a placeholder, which callers do not use.
    return group  # type: ignore[return-value]


def disjoint_groups(
    parts: Sequence[Sequence[int]], timeout: timedelta | None, options: Callable[[], Any] | None = None
) -> dist.ProcessGroup | None:
    """Create a group for each part; a collective call of all ranks.

    Args:
        parts: disjoint lists of ranks; a list of a single rank gets no group.
        timeout: timeout of blocking communication; default: torch's.
        options: function that returns a new object with NCCL's options, since NCCL changes the object.

    Returns:
        This rank's group, if any.
    """
    shared = [list(part) for part in parts if len(part) > 1]
    if not shared:
        return None
    # NCCL splits the communicator of all ranks for new groups if the default group is bound to a device.
    if dist.get_backend() == "nccl" and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        group = dist.split_group(split_ranks=shared, timeout=timeout, pg_options=options() if options else None)
        return group if any(dist.get_rank() in part for part in shared) else None  # type: ignore[return-value]
    mine = None
    for part in shared:
        group = new_group(timeout, part, options=options)
        if dist.get_rank() in part:
            mine = group
    return mine


def neighbour_options() -> Any:
    """Return NCCL's options for groups of two neighbours.

    A message is a kernel that occupies its thread blocks until the other side's kernel runs. So messages get few
    blocks. They also get a stream of high priority, since other ranks wait for them.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _MOST_CTAS
    return options


def unbind_default_group() -> None:
    """Unbind the default group from its device unless its backend is NCCL.

    Lightning binds the group to the rank's GPU. If ranks share a GPU, the backend is gloo. Then torch would try to
    split the communicator for every new group, which gloo does not support.
    """
    world = dist.group.WORLD
    if dist.is_initialized() and world is not None and "nccl" not in dist.get_backend_config(world):
        world.bound_device_id = None


class HostWork:
    """Send or receive of host data, with the interface of torch's ``Work``; a thread waits for the message.

    Args:
        work: gloo's work, for which nothing else waits; or a function, called in the thread, that starts the work.
    """

    def __init__(self, work: dist.Work | Callable[[], dist.Work]) -> None:
        self._error: BaseException | None = None
        self._done = threading.Event()
        # Only the thread references gloo's work, which references the tensor. Both are freed when the thread ends.
        background.run(lambda: self._wait(work), "host-work")

    def is_completed(self) -> bool:
        """Return whether the message is complete or has failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for the message.

        Raises:
            RuntimeError: the message failed.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def _wait(self, work: dist.Work | Callable[[], dist.Work]) -> None:
        try:
            (work() if callable(work) else work).wait()
        except BaseException as error:  # raised later, by wait()
            self._error = error
        self._done.set()


def backend_of(devices: Sequence[torch.device] | None, given: str | None) -> str | None:
    """Return the backend of process groups: the user's choice; or gloo if ranks share a GPU; else None.

    With None, Lightning chooses.

    Args:
        devices: device of each rank of this machine.
        given: the user's choice.
    """
    gpus = [device for device in devices or () if device.type == "cuda"]
    return given or (None if len(set(gpus)) == len(gpus) else "gloo")


def join_again(backend: str, device: torch.device, timeout: timedelta | None) -> None:
    """Create the default group under new keys of the store if torchrun restarted this process on a single machine.

    With several machines, users must set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` instead, because each machine's agent
    counts restarts separately.

    Args:
        backend: backend of the group.
        device: device of this rank.
        timeout: timeout of blocking communication; default: torch's.
    """
    environment = os.environ
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    alone = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    if dist.is_initialized() or not (restarts and shares_store and alone):
        return
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"restart_{restarts}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, timeout=timeout, world_size=int(environment["WORLD_SIZE"]), rank=int(environment["RANK"]), store=own,
        device_id=device if "nccl" in backend else None,
    )  # fmt: skip
    if "nccl" in backend:
        atexit.register(_leave)  # as Lightning does


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
