"""How a strategy starts the process group of a run: on which backend, and again after a restart by torchrun.

NCCL refuses several stages on one GPU.

torchrun's agent serves one key-value store to all attempts, in which torch looks for the addresses of the ranks: it
finds those of processes that are gone, and waits for them (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


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
