"""The store through which ranks find each other before they have process groups, listening on one address alone.

Lightning lets torch make the store on rank 0, and torch listens on every interface of the machine. But a store that was
made before, in the same process and on the same port, is what torch takes instead (``multi_tenant``): so it is made
here first, on a socket that is bound already. Under torchrun the store is that of torchrun itself, which made it
before this process began.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore, default_pg_timeout  # type: ignore[attr-defined]

from lightning_asyncpp.core.ranks.interfaces import addresses_of_all
from lightning_asyncpp.errors import ConfigurationError


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
