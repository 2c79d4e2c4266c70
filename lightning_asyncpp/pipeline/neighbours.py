"""Connects every stage with the stage before and the stage after it.

Every stage but the first listens, tells all ranks where, and is called by the stage before. A caller tries the
addresses in turn: first a local one, which only processes of the same machine (and the same network namespace) reach
and which is a third faster than a network address; then all of the machine's network addresses, for which of them
others can reach, the machine does not know. Both ends prove by a secret that went over the process group that they are
who they should be.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from lightning_asyncpp.pipeline.agreement import exchange
from lightning_asyncpp.pipeline.errors import PeerLostError
from lightning_asyncpp.pipeline.link import Link
from lightning_asyncpp.pipeline.mesh import Mesh

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface to use, that of torch's own gloo."""
_SIOCGIFADDR = 0x8915
_SECRET_BYTES = 16
_CALL_SECONDS = 10.0
_ANSWER_SECONDS = 120.0


class Neighbours(NamedTuple):
    """Links with the stage before and the stage after; None at the ends of the pipeline."""

    before: Link | None
    after: Link | None


def connect_neighbours(mesh: Mesh, timeout: float | None = None) -> Neighbours:
    """Connect the stages of every replica; a collective call.

    Args:
        mesh: this rank's place; its groups are connected.
        timeout: seconds that a wait in the links may take; default: half an hour.

    Raises:
        PeerLostError: a neighbour cannot be reached.
    """
    with ExitStack() as closing:
        listeners = [] if mesh.is_first else [closing.enter_context(listener) for listener in _listen()]
        secret = secrets.token_bytes(_SECRET_BYTES)
        offers = exchange(mesh, json.dumps(_offer(listeners, secret)))
        after = None if mesh.is_last else _call(mesh, json.loads(offers[mesh.rank_of(mesh.stage + 1)]))
        before = _answer(mesh, listeners, secret) if listeners else None
    ends = ((before, mesh.stage - 1), (after, mesh.stage + 1))
    return Neighbours(*(None if c is None else Link(c, mesh.name_of(stage), timeout) for c, stage in ends))


def _listen() -> list[socket.socket]:
    dual = socket.has_dualstack_ipv6()
    listeners = [socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)]
    if sys.platform == "linux":  # elsewhere a local address is a file, which somebody would have to remove
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind("\0asyncpp-" + secrets.token_hex(_SECRET_BYTES))
        listeners[-1].listen()
    return listeners


def _offer(listeners: list[socket.socket], secret: bytes) -> dict[str, Any]:
    """Where a stage listens, as JSON can say it."""
    if not listeners:
        return {}
    network, *local = listeners
    port = network.getsockname()[1]
    return {
        "local": [listener.getsockname().decode() for listener in local],
        "network": [(host, port) for host in _own_addresses()],
        "secret": secret.hex(),
    }


def _call(mesh: Mesh, offer: dict[str, Any]) -> socket.socket:
    secret = bytes.fromhex(offer["secret"])
    tried = []
    for address in [*offer["local"], *map(tuple, offer["network"])]:
        try:
            connection = _connect(address)
            connection.sendall(secret)
            if _read(connection, _SECRET_BYTES) == secret[::-1]:
                return connection
            connection.close()
            tried.append(f"{address} (somebody else)")
        except OSError as error:
            tried.append(f"{address} ({error})")
    raise PeerLostError(
        f"{mesh.name_of(mesh.stage + 1)} cannot be reached from stage {mesh.stage} at {', '.join(tried)}:"
        f" set {INTERFACE_VARIABLE} on all machines to the network interface that connects them, and let a firewall"
        " pass it"
    )


def _connect(address: str | tuple[str, int]) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=_CALL_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CALL_SECONDS)
    connection.connect(address)
    return connection


def _answer(mesh: Mesh, listeners: list[socket.socket], secret: bytes) -> socket.socket:
    deadline = time.monotonic() + _ANSWER_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        called, _, _ = select.select(listeners, [], [], left)
        for listener in called:
            with suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(_CALL_SECONDS)
                if _read(connection, _SECRET_BYTES) == secret:
                    connection.sendall(secret[::-1])
                    return connection
                connection.close()
    raise PeerLostError(f"{mesh.name_of(mesh.stage - 1)} did not call")


def _read(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            break
        received += part
    return received


def _own_addresses() -> list[str]:
    """Where others may reach this machine: the interface that was named, or all of them, the likeliest first."""
    if names := os.environ.get(INTERFACE_VARIABLE):
        return [address for name in names.split(",") if (address := _address_of(name.strip()))]
    candidates = [_address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))]
    candidates += [_address_of(name) for _, name in socket.if_nameindex()]
    return list(dict.fromkeys(address for address in candidates if address))


def _address_towards(host: str) -> str | None:
    """This machine's address on the way to ``host``; nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
