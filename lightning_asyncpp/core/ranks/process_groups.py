"""Process groups: how the first one starts, those that all ranks make together, and messages on them.

With NCCL every new group splits the communicator of all ranks, and all of them take part, whoever is in it: groups that
have no rank in common are made by one split. NCCL refuses several stages on one GPU.

``isend`` and ``irecv`` of gloo say that they are done only to whoever waits for them: ``is_completed()`` stays false
until then. Polling them would keep what was sent for ever, and never take up what has arrived. So a thread waits.

torchrun's agent serves one key-value store to all attempts, in which torch looks for the addresses of the ranks: it
finds those of processes that are gone, and waits for them (https://github.com/pytorch/pytorch/issues/135712).
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
"""Thread blocks (cooperative thread arrays) of a message between neighbours."""


def new_group(
    timeout: timedelta | None,
    ranks: Sequence[int] | None = None,
    backend: str | None = None,
    options: Callable[[], Any] | None = None,
) -> dist.ProcessGroup:
    """Make one group; a collective call of all ranks.

    Args:
        timeout: of blocking communication in it; default: torch's.
        ranks: that are in it; default: all.
        backend: default: that of the default group.
        options: makes those of NCCL, if it is NCCL's; it changes what it is given.
    """
    given = options() if options is not None and dist.get_backend() == "nccl" else None
    members = None if ranks is None else list(ranks)
    group = dist.new_group(members, timeout=timeout, backend=backend, pg_options=given)
    # Ranks outside a group get a placeholder, which no caller here ever uses.
    return group  # type: ignore[return-value]


def disjoint_groups(
    parts: Sequence[Sequence[int]], timeout: timedelta | None, options: Callable[[], Any] | None = None
) -> dist.ProcessGroup | None:
    """Make a group of each part; a collective call of all ranks.

    Args:
        parts: ranks; no rank is in two of them, and a part of a single one gets no group.
        timeout: of blocking communication in them; default: torch's.
        options: makes those of NCCL; it changes what it is given.

    Returns:
        The group that this rank is in, if there is one.
    """
    shared = [list(part) for part in parts if len(part) > 1]
    if not shared:
        return None
    if splits():
        group = dist.split_group(split_ranks=shared, timeout=timeout, pg_options=options() if options else None)
        return group if any(dist.get_rank() in part for part in shared) else None  # type: ignore[return-value]
    mine = None
    for part in shared:
        group = new_group(timeout, part, options=options)
        if dist.get_rank() in part:
            mine = group
    return mine


def splits() -> bool:
    """Return whether groups split the communicator of all ranks: NCCL's, bound to a device from the start."""
    world = dist.group.WORLD
    return dist.get_backend() == "nccl" and world is not None and getattr(world, "bound_device_id", None) is not None


def neighbour_options() -> Any:
    """NCCL's options for the groups of two neighbours.

    A message between them is a kernel that holds its thread blocks until the other side's kernel runs, beside what is
    computed. So it gets few of them, and a stream of high priority: what others wait for begins before what was
    launched earlier.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _MOST_CTAS
    return options


def unbind_default_group() -> None:
    """Let the default group forget its device, where its backend makes no use of it.

    Lightning binds the group to the rank's GPU. Where several ranks share one, the backend is gloo, and torch would ask
    it to split its communicator with every new group, which it cannot.
    """
    world = dist.group.WORLD
    if dist.is_initialized() and world is not None and "nccl" not in dist.get_backend_config(world):
        world.bound_device_id = None


class HostWork:
    """Stands for the ``Work`` of a send or a receive of host data.

    Args:
        work: of gloo, which nobody else waits for; or what begins it, to be called in the thread.
    """

    def __init__(self, work: dist.Work | Callable[[], dist.Work]) -> None:
        self._error: BaseException | None = None
        self._done = threading.Event()
        # The thread alone keeps gloo's object, which keeps the tensor: both go when it is done.
        background.run(lambda: self._wait(work), "host-work")

    def is_completed(self) -> bool:
        """Return whether it is done, or failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it failed.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def _wait(self, work: dist.Work | Callable[[], dist.Work]) -> None:
        try:
            (work() if callable(work) else work).wait()
        except BaseException as error:  # raised again for whoever waits
            self._error = error
        self._done.set()


def backend_of(devices: Sequence[torch.device] | None, given: str | None) -> str | None:
    """The process group's backend for the devices of this machine's ranks; None leaves the choice to Lightning.

    Args:
        devices: one for each rank of this machine.
        given: the user's choice.
    """
    gpus = [device for device in devices or () if device.type == "cuda"]
    return given or (None if len(set(gpus)) == len(gpus) else "gloo")


def join_again(backend: str, device: torch.device, timeout: timedelta | None) -> None:
    """Make the default group under keys of its own, if torchrun started this process again on a single machine.

    Agents of several machines count restarts each for itself; there they must not share their store
    (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``).

    Args:
        backend: of the group.
        device: of this rank.
        timeout: of blocking communication; default: torch's.
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
