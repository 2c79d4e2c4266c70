"""Connections of neighbouring stages: each stage sends its address to the previous stage over the process group."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.link import Link
from lightning_asyncpp.errors import PeerLostError, lost_peers

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface; torch's gloo reads it, too."""
_TAG = 3
_OFFER_BYTES = 512
_TOKEN_BYTES = 16
_SHOW_SECONDS = 5.0
_CALL_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_SIOCGIFADDR = 0x8915


class Neighbours(NamedTuple):
    """Links to the previous and the next stage; None at the ends of the pipeline."""

    prev: Link | None
    next: Link | None


def connect_neighbours(mesh: Mesh, prev_timeout: float | None = None, next_timeout: float | None = None) -> Neighbours:
    """Connect the stages of every replica; a collective call.

    Args:
        mesh: connected mesh of ranks.
        prev_timeout: longest wait for the previous stage, in seconds; default: half an hour.
        next_timeout: longest wait for the next stage, in seconds; default: half an hour.

    Raises:
        PeerLostError: a neighbour cannot be reached.
    """
    assert mesh.groups is not None
    group, offer = mesh.groups.host, torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
    links: list[Link | None] = [None, None]
    with ExitStack() as stack, lost_peers():
        if not mesh.is_first:
            listener = stack.enter_context(closing(Listener()))
            text = torch.frombuffer(bytearray(listener.offer.ljust(_OFFER_BYTES).encode()), dtype=torch.uint8)
            dist.send(text, mesh.rank_of(mesh.stage - 1), group=group, tag=_TAG)
        if not mesh.is_last:
            rank = mesh.rank_of(mesh.stage + 1)
            who = mesh.name_of(rank)
            dist.recv(offer, rank, group=group, tag=_TAG)
            links[1] = Link(call(offer.numpy().tobytes().decode(), who), who, next_timeout)
        if not mesh.is_first:
            who = mesh.name_of(mesh.rank_of(mesh.stage - 1))
            links[0] = Link(listener.answer(who), who, prev_timeout)
    return Neighbours(*links)


def use_loopback() -> None:
    """Restrict connections to loopback unless the user named an interface; call this before the first process group."""
    if not os.environ.get(INTERFACE_VARIABLE) and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ[INTERFACE_VARIABLE] = "lo"
        # "=" means an exact match: without it, NCCL takes the name as a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")


class Listener:
    """Listener for a single caller, which must send a secret token.

    Attributes:
        offer: address and token as JSON, for the caller.
    """

    def __init__(self) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listening = socket.create_server((network_address(), 0))
        self.offer = json.dumps({"address": self._listening.getsockname(), "token": self._token.hex()})

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()

    def answer(self, who: str, seconds: float = _ANSWER_SECONDS) -> socket.socket:
        """Wait for a caller with the token, and return its connection.

        Args:
            who: name of the caller in messages.
            seconds: longest wait, in seconds.

        Raises:
            PeerLostError: no caller sent the token in time.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._listening.settimeout(left)
            with suppress(TimeoutError):
                connection, _ = self._listening.accept()
                if secrets.compare_digest(_shown(connection), self._token):
                    return connection
                connection.close()
        raise PeerLostError(f"{who} did not call within {seconds:g} seconds")


def call(offer: str, who: str) -> socket.socket:
    """Connect to the next stage.

    Args:
        offer: ``offer`` of the next stage's :class:`Listener`.
        who: name of the next stage in messages.

    Raises:
        PeerLostError: the next stage cannot be reached.
    """
    offered = json.loads(offer)
    host, port = offered["address"]
    try:
        connection = socket.create_connection((host, port), timeout=_CALL_SECONDS)
        connection.sendall(bytes.fromhex(offered["token"]))
    except OSError as error:
        raise PeerLostError(
            f"{who} cannot be reached from {socket.gethostname()} at {host}, port {port} ({error}): set"
            f" {INTERFACE_VARIABLE} on all machines to the network interface that connects them, and allow connections"
            " on it in the firewall"
        ) from None
    return connection


def network_address() -> str:
    """Return the address of the interface in ``GLOO_SOCKET_IFNAME``, else that of the host name, as gloo does."""
    if address := _address_of(os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0]):
        return address
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _shown(connection: socket.socket) -> bytes:
    """Return the token that a caller sends; only a part of it if the rest does not arrive in time."""
    connection.settimeout(_SHOW_SECONDS)
    received = b""
    with suppress(OSError):
        while len(received) < _TOKEN_BYTES and (part := connection.recv(_TOKEN_BYTES - len(received))):
            received += part
    return received


def _address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
