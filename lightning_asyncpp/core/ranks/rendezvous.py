"""How a stage is connected with the one before it: by a socket, whose address travels over the process group.

It listens in the network that gloo uses. Each side shows half of a token that travelled with the address, so that
whoever else calls, or answers, is not taken for the neighbour.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack, suppress

import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError, PeerLostError, lost_peers

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface to use, that of torch's own gloo."""
LOOPBACK = "lo"
_TAG = 3
_OFFER_BYTES = 512
_HALF_BYTES = 16
_SHOW_SECONDS = 5.0
_CALL_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_SIOCGIFADDR = 0x8915


def use_loopback() -> None:
    """Let this process connect over loopback alone, before its first process group, unless an interface is named."""
    if not os.environ.get(INTERFACE_VARIABLE) and LOOPBACK in _interfaces():
        os.environ[INTERFACE_VARIABLE] = LOOPBACK
        # Exactly: without the sign NCCL takes it for a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")


def connect_stages(mesh: Mesh) -> tuple[socket.socket | None, socket.socket | None]:
    """Connect this stage with its neighbours; a collective call of each replica.

    Args:
        mesh: this rank's place; its groups are connected.

    Returns:
        With the stage before and the stage after; ``None`` at the ends of the pipeline.

    Raises:
        ConfigurationError: the interface that was named has no address here.
        PeerLostError: a neighbour cannot be reached.
    """
    assert mesh.groups is not None
    group, offer = mesh.groups.host, torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
    with ExitStack() as closing, lost_peers():
        before = after = None
        if not mesh.is_first:
            listener = closing.enter_context(Listener())
            text = torch.frombuffer(bytearray(listener.offer.ljust(_OFFER_BYTES).encode()), dtype=torch.uint8)
            dist.send(text, mesh.rank_of(mesh.stage - 1), group=group, tag=_TAG)
        if not mesh.is_last:
            dist.recv(offer, mesh.rank_of(mesh.stage + 1), group=group, tag=_TAG)
            call = Call(offer.numpy().tobytes().decode(), mesh.name_of(mesh.stage + 1))
        if not mesh.is_first:
            before = listener.answer(mesh.name_of(mesh.stage - 1))
        if not mesh.is_last:  # only now: that stage answers once it has called the one after it
            after = call.answered()
    return before, after


class Listener:
    """Waits for the one caller who was told where.

    Attributes:
        offer: JSON for the caller.
    """

    def __init__(self) -> None:
        self._token = secrets.token_bytes(2 * _HALF_BYTES)
        self._listening = socket.create_server((network_address(), 0))
        self.offer = json.dumps({"address": self._listening.getsockname(), "token": self._token.hex()})

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def answer(self, who: str, seconds: float = _ANSWER_SECONDS) -> socket.socket:
        """Wait for the caller who knows the token.

        Args:
            who: is to call, for messages.
            seconds: to wait.

        Raises:
            PeerLostError: nobody called who knows it.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._listening.settimeout(left)
            with suppress(TimeoutError):
                connection, _ = self._listening.accept()
                if _shows(connection, self._token[:_HALF_BYTES], _SHOW_SECONDS):
                    connection.sendall(self._token[_HALF_BYTES:])
                    return connection
                connection.close()
        raise PeerLostError(f"{who} did not call within {seconds:g} seconds")


class Call:
    """A call of the stage after, which has not answered yet.

    Args:
        offer: of its :class:`Listener`.
        who: it is, for messages.

    Raises:
        PeerLostError: it cannot be reached.
    """

    def __init__(self, offer: str, who: str) -> None:
        told = json.loads(offer)
        (self._host, self._port), self._token = told["address"], bytes.fromhex(told["token"])
        self._who = who
        try:
            self._connection = socket.create_connection((self._host, self._port), timeout=_CALL_SECONDS)
            self._connection.sendall(self._token[:_HALF_BYTES])
        except OSError as error:
            raise self._failed(str(error)) from None

    def answered(self, seconds: float = _ANSWER_SECONDS) -> socket.socket:
        """The connection, once the other side has answered.

        Raises:
            PeerLostError: it does not, or is somebody else.
        """
        if not _shows(self._connection, self._token[_HALF_BYTES:], seconds):
            self._connection.close()
            raise self._failed("nobody, or somebody else, answers")
        return self._connection

    def _failed(self, why: str) -> PeerLostError:
        return PeerLostError(
            f"{self._who} cannot be reached from {socket.gethostname()} at {self._host}, port {self._port} ({why}): set"
            f" {INTERFACE_VARIABLE} on all machines to the network interface that connects them, and let a firewall"
            " pass it"
        )


def network_address() -> str:
    """This machine's address in the network that gloo uses: of the interface that was named, or of the host's name.

    Raises:
        ConfigurationError: there is no such interface here, or it has no address.
    """
    if name := os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0]:
        if (address := _address_of(name)) is not None:
            return address
        raise ConfigurationError(
            f"{INTERFACE_VARIABLE}={name}: {socket.gethostname()} has no such network interface with an IPv4 address;"
            f" it has {', '.join(_interfaces())}"
        )
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _shows(connection: socket.socket, half: bytes, seconds: float) -> bool:
    """Whether the other side shows this half of the token in time."""
    connection.settimeout(seconds)
    received = b""
    with suppress(OSError):
        while len(received) < _HALF_BYTES and (part := connection.recv(_HALF_BYTES - len(received))):
            received += part
    return secrets.compare_digest(received, half)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; ``None`` if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]
