"""How a strategy starts the process group of a run: its store, a start again by torchrun, and GPUs that are shared.

The store through which ranks find each other before they have process groups, listening on one address alone.

Lightning lets torch make the store on rank 0, and torch listens on every interface of the machine. But a store that was
made before, in the same process and on the same port, is what torch takes instead (``multi_tenant``): so it is made
here first, on a socket that is bound already. Under torchrun the store is that of torchrun itself, which made it
before this process began.

The process group of a run that torchrun started again.

torchrun's agent serves one key-value store to all attempts, in which torch looks for the addresses of the ranks: it
finds those of processes that are gone, and waits for them (https://github.com/pytorch/pytorch/issues/135712).

What GPUs allow: several stages on one, which NCCL refuses, and one queue for all that runs, which slows.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, default_pg_timeout  # type: ignore[attr-defined]

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.ranks.interfaces import addresses_of_all


@contextmanager
def store_listening_on(
    environment: Any, addresses: Sequence[str], rank: int, on_one_machine: bool, timeout: timedelta | None = None
) -> Iterator[Any]:
    """Bind the store to an interface while the process group is made.

    Args:
        environment: Lightning's ClusterEnvironment.
        addresses: of this machine's interfaces that may be listened on; none if all may.
        rank: of this process.
        on_one_machine: whether all ranks run on this machine.
        timeout: of the store; default: torch's.

    Yields:
        The environment to use meanwhile: its main address is one at which the store is reached from here.

    Raises:
        ConfigurationError: the other machines are told to look for rank 0 at another address; or its port is taken.
    """
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) and not dist.is_initialized()
    if not (addresses and own_store and (rank == 0 or on_one_machine)):
        yield environment
        return
    if not on_one_machine:
        _check_main_address(environment.main_address, addresses)
    store = _listening_store(addresses[0], environment.main_port, timeout) if rank == 0 else None
    try:
        yield _ReachedAt(environment, addresses[0])
    finally:
        del store  # torch's own keeps the server


class _ReachedAt:
    """A ClusterEnvironment with another main address."""

    def __init__(self, environment: Any, main_address: str) -> None:
        self._environment, self.main_address = environment, main_address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def _listening_store(address: str, port: int, timeout: timedelta | None) -> TCPStore:
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        raise ConfigurationError(
            f"rank 0 cannot listen on {address}, port {port} ({error.strerror}): set MASTER_PORT to a free port"
        ) from error
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout or default_pg_timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _check_main_address(main_address: str, addresses: Sequence[str]) -> None:
    """Refuse if others look for rank 0 where it does not listen; an address of somebody else may lead here, too."""
    try:
        named = socket.gethostbyname(main_address)
    except OSError:
        return  # torch says it better
    others = [address for address in addresses_of_all() if not address.startswith("127.")]
    if named in others and named not in addresses:
        raise ConfigurationError(
            f"MASTER_ADDR={main_address} is {named}, but the network interface that was named has {addresses[0]}: set"
            f" MASTER_ADDR={addresses[0]} on all machines, or name the interface that has {named}"
        )


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


QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def backend_of(devices: Sequence[torch.device] | None, given: str | None) -> str | None:
    """The process group's backend for the devices of this machine's ranks; None leaves the choice to Lightning.

    Args:
        devices: one for each rank of this machine.
        given: the user's choice.

    Raises:
        ConfigurationError: NCCL was chosen though ranks share a GPU, or have none.
    """
    gpus = [device for device in devices or () if device.type == "cuda"]
    is_nccl = given is not None and given.lower() == "nccl"  # torch takes it in any case
    if is_nccl and devices and not gpus:
        raise ConfigurationError(
            f"process_group_backend={given!r} needs GPUs, and the ranks of this machine are on"
            f" {', '.join(sorted({str(device) for device in devices}))}: leave the backend out"
        )
    if len(set(gpus)) == len(gpus):
        return given
    if is_nccl:
        raise ConfigurationError(
            f"process_group_backend={given!r}: NCCL refuses several ranks on one GPU, and"
            f" parallel_devices={[str(device) for device in gpus]} names one more than once; leave the backend out, or"
            " give every stage a GPU of its own"
        )
    return given or "gloo"


def queue_warning(device: torch.device, connections: str | None) -> str | None:
    """What to tell somebody whose GPU has one hardware queue for everything.

    Args:
        device: of this rank.
        connections: what the environment variable ``CUDA_DEVICE_MAX_CONNECTIONS`` says.
    """
    if device.type != "cuda" or connections != "1":
        return None
    return (
        f"{QUEUES_VARIABLE}=1 gives a GPU one queue, in which messages between stages and what is computed wait"
        " for each other: unset it, unless something else here needs it (Megatron's tensor parallelism does)"
    )
