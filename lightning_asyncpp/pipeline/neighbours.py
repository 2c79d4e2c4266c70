"""Connects every stage with the stage before and the stage after it.

Every stage but the first listens, tells all ranks where, and is called by the stage before. A caller tries the
addresses in turn: which of a machine's addresses others can reach, the machine does not know. Both ends prove by a
secret that went over the process group that they are who they should be.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
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
    listener = None if mesh.is_first else _listen()
    offer: dict[str, Any] = {}
    secret = secrets.token_bytes(_SECRET_BYTES)
    if listener is not None:
        offer = {"hosts": _own_addresses(), "port": listener.getsockname()[1], "secret": secret.hex()}
    try:
        offers = exchange(mesh, json.dumps(offer))
        after = None if mesh.is_last else _call(mesh, json.loads(offers[mesh.rank_of(mesh.stage + 1)]))
        before = None if listener is None else _answer(mesh, listener, secret)
    finally:
        if listener is not None:
            listener.close()
    return Neighbours(*(None if connection is None else Link(connection, timeout) for connection in (before, after)))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _call(mesh: Mesh, offer: dict[str, Any]) -> socket.socket:
    secret = bytes.fromhex(offer["secret"])
    tried = []
    for host in offer["hosts"]:
        try:
            connection = socket.create_connection((host, offer["port"]), timeout=_CALL_SECONDS)
            connection.sendall(secret)
            if _read(connection, _SECRET_BYTES) == secret[::-1]:
                return connection
            connection.close()
            tried.append(f"{host} (somebody else)")
        except OSError as error:
            tried.append(f"{host} ({error})")
    rank = mesh.rank_of(mesh.stage + 1)
    raise PeerLostError(
        f"rank {rank} (stage {mesh.stage + 1}) cannot be reached from stage {mesh.stage} at port {offer['port']} of"
        f" {', '.join(tried)}: set {INTERFACE_VARIABLE} on all machines to the network interface that connects them,"
        " and let a firewall pass it"
    )


def _answer(mesh: Mesh, listener: socket.socket, secret: bytes) -> socket.socket:
    deadline = time.monotonic() + _ANSWER_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(_CALL_SECONDS)
            if _read(connection, _SECRET_BYTES) == secret:
                connection.sendall(secret[::-1])
                return connection
            connection.close()
    raise PeerLostError(f"rank {mesh.rank_of(mesh.stage - 1)} (stage {mesh.stage - 1}) did not call")


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
