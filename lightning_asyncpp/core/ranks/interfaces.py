"""Which network interface connections use: the one that the environment names, or loopback on a single machine."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

from lightning_asyncpp.errors import ConfigurationError

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface to use, that of torch's own gloo."""
_NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915


def use_loopback() -> None:
    """Let this process connect over loopback alone, before its first process group, unless an interface is named."""
    if not os.environ.get(INTERFACE_VARIABLE) and LOOPBACK in _names():
        os.environ[INTERFACE_VARIABLE] = LOOPBACK
        os.environ.setdefault(_NCCL_VARIABLE, f"={LOOPBACK}")  # exactly: without the sign NCCL takes it for a prefix


def named_addresses() -> list[str]:
    """The IPv4 addresses of the interfaces that the variable names; none if it names none.

    Raises:
        ConfigurationError: there is no such interface here, or it has no address.
    """
    names = [name for name in os.environ.get(INTERFACE_VARIABLE, "").split(",") if name]
    addresses = {name: address_of(name) for name in names}
    if None in addresses.values():
        raise ConfigurationError(
            f"{INTERFACE_VARIABLE}={','.join(names)}: {socket.gethostname()} has no such network interface with an IPv4"
            f" address; it has {', '.join(_names())}"
        )
    return [address for address in addresses.values() if address]


def own_addresses() -> list[str]:
    """Where others may reach this machine: the interface that was named, or all of them, the likeliest first."""
    if addresses := named_addresses():
        return addresses
    likeliest = _address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return list(dict.fromkeys([likeliest, *addresses_of_all()] if likeliest else addresses_of_all()))


def addresses_of_all() -> list[str]:
    """The IPv4 addresses of all interfaces of this machine."""
    return [address for name in _names() if (address := address_of(name))]


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; ``None`` if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_towards(host: str) -> str | None:
    """This machine's address on the way to ``host``; nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
