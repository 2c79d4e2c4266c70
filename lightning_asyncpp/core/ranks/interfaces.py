"""Which network interface a run's connections use: the one that the user names, or loopback on a single machine."""

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


def use_interface(interface: str | None, on_one_machine: bool) -> list[str]:
    """Settle for this process, before its first process group, which interface its connections use.

    A name that is given goes into the variables that gloo and NCCL read. Without one, what the variables say stays; if
    they say nothing and all ranks are on one machine, it is loopback.

    Args:
        interface: name, or names with commas between; ``None`` if the user gave none.
        on_one_machine: whether all ranks run on this machine.

    Returns:
        The IPv4 addresses of the interfaces; none if anything may be used.

    Raises:
        ConfigurationError: there is no such interface here, or it has no address.
    """
    source = f"{INTERFACE_VARIABLE}="
    if interface is not None:
        if not isinstance(interface, str):
            raise ConfigurationError(f"interface={interface!r} must be the name of a network interface, such as 'eth0'")
        source, interface = "interface=", ",".join(name.strip() for name in interface.split(","))
    elif not os.environ.get(INTERFACE_VARIABLE) and on_one_machine and LOOPBACK in _names():
        interface = LOOPBACK
    if interface is not None:
        _check_names(interface, source)
        os.environ[INTERFACE_VARIABLE] = interface
        if source == "interface=" or not os.environ.get(_NCCL_VARIABLE):
            os.environ[_NCCL_VARIABLE] = f"={interface}"  # exactly: without the sign NCCL takes it for a prefix
    return named_addresses(source)


def named_addresses(source: str = f"{INTERFACE_VARIABLE}=") -> list[str]:
    """The IPv4 addresses of the interfaces that the variable names; none if it names none.

    Args:
        source: what named them, for messages.

    Raises:
        ConfigurationError: as :func:`use_interface`.
    """
    names = os.environ.get(INTERFACE_VARIABLE)
    return _check_names(names, source) if names else []


def _check_names(names: str, source: str) -> list[str]:
    """The addresses of interfaces of this machine.

    Args:
        names: with commas between.
        source: what named them, for messages.

    Raises:
        ConfigurationError: as :func:`use_interface`.
    """
    addresses = []
    for name in names.split(","):
        if name not in _names():
            raise ConfigurationError(
                f"{source}{names}: {socket.gethostname()} has no network interface {name!r}; it has"
                f" {', '.join(_names())}: name one of them"
            )
        if (address := address_of(name)) is None:
            raise ConfigurationError(
                f"{source}{names}: the network interface {name!r} of {socket.gethostname()} has no IPv4 address; name"
                " another one, or give it an address and bring it up (`ip address add`, `ip link set ... up`)"
            )
        addresses.append(address)
    return addresses


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
