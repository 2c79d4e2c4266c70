"""A byte stream between two neighbouring stages, and how they connect: addresses travel over the process group."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import PeerLostError, lost_peers, peer_lost

_PREFIX = struct.Struct("<qqq")
_BUFFER_BYTES = 8192
_DEFAULT_TIMEOUT = 1800.0
NO_TIMEOUT = 0.0
"""Seconds, as the kernel takes them: a wait does not end by itself."""
Bytes = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """What stands before a message: what it is, which micro-batch or mini-batch it is of, and its size in bytes."""

    kind: int
    number: int
    num_bytes: int


class Link:
    """One end of a connection with a neighbour.

    Args:
        connection: a connected stream socket; the link owns it.
        peer: who is at the other end, for messages.
        timeout: seconds that a wait for the other side may take, or ``NO_TIMEOUT``; None: half an hour.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: float | None = None) -> None:
        self.peer = peer
        self.timeout = _DEFAULT_TIMEOUT if timeout is None else timeout
        self._socket = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # what is in the buffer and was not asked for yet
        self._backlog = _Backlog(connection)
        if connection.family == socket.AF_INET:  # tests use pairs of local sockets
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own time-outs: those of Python cost another call in front of every read.
        connection.setblocking(True)
        seconds = struct.pack("@ll", int(self.timeout), int(self.timeout % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, seconds)

    def write(self, kind: int, number: int, parts: Sequence[Bytes]) -> None:
        """Send a message; returns at once.

        Args:
            kind, number: what the other end finds in the frame.
            parts: the message, of single bytes; they may change as soon as this returns.

        Raises:
            PeerLostError: the connection is broken.
        """
        size = 0
        for part in parts:
            size += len(part)
        unsent: list[Bytes] = [_PREFIX.pack(kind, number, size), *parts]
        try:
            if not self._backlog.parts:
                unsent = self._send_now(unsent, _PREFIX.size + size)
            if unsent:
                self._backlog.add([bytes(part) for part in unsent if part])
        except OSError as error:
            raise peer_lost(self.peer, error) from None

    def wait_for_backlog(self, limit: int) -> None:
        """Wait until the other side has read so much that no more than ``limit`` parts of messages are unsent.

        Raises:
            PeerLostError: the connection is broken, or the other side did not read for ``timeout`` seconds.
        """
        try:
            self._backlog.wait(limit)
        except OSError as error:
            raise peer_lost(self.peer, error) from None

    def read_frame(self) -> Frame:
        """Wait for the beginning of the next message; :meth:`read_into` then takes exactly ``num_bytes`` bytes.

        Raises:
            PeerLostError: the connection is broken, or nothing came for ``timeout`` seconds.
        """
        size = _PREFIX.size
        if self._end - self._start < size:
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
            while self._end < size:
                self._end += self._receive(self._buffer[self._end :])
        frame = Frame(*_PREFIX.unpack_from(self._buffer, self._start))
        self._start += size
        return frame

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` (bytes) with what comes next, waiting for it.

        Raises:
            PeerLostError: as for :meth:`read_frame`.
        """
        filled = min(view.nbytes, self._end - self._start)
        view[:filled] = self._buffer[self._start : self._start + filled]
        self._start += filled
        while filled < view.nbytes:
            filled += self._receive(view[filled:])

    def hang_up(self) -> None:
        """End the connection, from any thread: whoever waits on either side gets an error."""
        with suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection once its backlog is sent; what was sent still arrives."""
        self._backlog.close()

    def _send_now(self, parts: list[Bytes], size: int) -> list[Bytes]:
        """Give the socket what it takes at once of ``size`` bytes; return the rest."""
        try:
            sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return parts
        if sent == size:
            return []
        for position, part in enumerate(parts):
            if sent < len(part):
                return [part[sent:], *parts[position + 1 :]]
            sent -= len(part)
        return []

    def _receive(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            late = TimeoutError(f"nothing came from it for {self.timeout:g} seconds")
            raise peer_lost(self.peer, late) from None
        except OSError as error:
            raise peer_lost(self.peer, error) from None
        if not count:
            raise peer_lost(self.peer, ConnectionResetError("Connection closed by peer"))
        return count


class Neighbours(NamedTuple):
    """Links with the stage before and the stage after; None at the ends of the pipeline."""

    before: Link | None
    after: Link | None


def connect_neighbours(mesh: Mesh, before: float | None = None, after: float | None = None) -> Neighbours:
    """Connect the stages of every replica; a collective call.

    Args:
        mesh: this rank's place; its groups are connected.
        before: seconds that a wait for the stage before may take; default: half an hour.
        after: the same for the stage after.

    Raises:
        PeerLostError: a neighbour cannot be reached.
    """
    here, there = connect_stages(mesh)
    return Neighbours(
        None if here is None else Link(here, mesh.name_of(mesh.stage - 1), before),
        None if there is None else Link(there, mesh.name_of(mesh.stage + 1), after),
    )


class _Backlog:
    """What a socket did not take at once, and the thread that sends it on: there is none until it is needed.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.parts: deque[bytes] = deque()  # not sent yet
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._closing = False

    def add(self, parts: Sequence[bytes]) -> None:
        """Send these after what is there already."""
        with self._changed:
            self._raise_error()
            self.parts.extend(parts)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def wait(self, limit: int) -> None:
        """Wait until no more than ``limit`` parts are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self.parts) <= limit)
            self._raise_error()

    def close(self) -> None:
        """Close the socket, now or after the last part."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._thread is None:
                self._socket.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _run(self) -> None:
        try:
            while part := self._next():
                self._socket.sendall(part)
                with self._changed:
                    self.parts.popleft()  # only now: until then nothing may overtake it
                    self._changed.notify_all()
        except OSError as error:
            with self._changed:
                late = isinstance(error, BlockingIOError)
                self._error = TimeoutError("it did not read in time") if late else error
                self._changed.notify_all()
        if self._closing:
            self._socket.close()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self.parts or self._closing)
            return self.parts[0] if self.parts else None


INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface to use, that of torch's own gloo."""
_TAG = 3
_OFFER_BYTES = 512
_TOKEN_BYTES = 16
_SHOW_SECONDS = 5.0
_CALL_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_SIOCGIFADDR = 0x8915


def use_loopback() -> None:
    """Let this process connect over loopback alone, before its first process group, unless an interface is named."""
    if not os.environ.get(INTERFACE_VARIABLE) and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ[INTERFACE_VARIABLE] = "lo"
        # Exactly: without the sign NCCL takes it for a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")


def connect_stages(mesh: Mesh) -> tuple[socket.socket | None, socket.socket | None]:
    """Connect this stage with its neighbours; a collective call of each replica.

    Args:
        mesh: this rank's place; its groups are connected.

    Returns:
        With the stage before and the stage after; ``None`` at the ends of the pipeline.

    Raises:
        PeerLostError: a neighbour cannot be reached.
    """
    assert mesh.groups is not None
    group, offer = mesh.groups.host, torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
    before = after = None
    with ExitStack() as stack, lost_peers():
        if not mesh.is_first:
            listener = stack.enter_context(closing(Listener()))
            text = torch.frombuffer(bytearray(listener.offer.ljust(_OFFER_BYTES).encode()), dtype=torch.uint8)
            dist.send(text, mesh.rank_of(mesh.stage - 1), group=group, tag=_TAG)
        if not mesh.is_last:
            dist.recv(offer, mesh.rank_of(mesh.stage + 1), group=group, tag=_TAG)
            after = call(offer.numpy().tobytes().decode(), mesh.name_of(mesh.stage + 1))
        if not mesh.is_first:
            before = listener.answer(mesh.name_of(mesh.stage - 1))
    return before, after


class Listener:
    """Waits for the one caller who was told where, and the token.

    Attributes:
        offer: JSON for the caller.
    """

    def __init__(self) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listening = socket.create_server((network_address(), 0))
        self.offer = json.dumps({"address": self._listening.getsockname(), "token": self._token.hex()})

    def close(self) -> None:
        """Take no calls any more."""
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
                if secrets.compare_digest(_shown(connection), self._token):
                    return connection
                connection.close()
        raise PeerLostError(f"{who} did not call within {seconds:g} seconds")


def call(offer: str, who: str) -> socket.socket:
    """Connect with the stage after.

    Args:
        offer: of its :class:`Listener`.
        who: it is, for messages.

    Raises:
        PeerLostError: it cannot be reached.
    """
    told = json.loads(offer)
    host, port = told["address"]
    try:
        connection = socket.create_connection((host, port), timeout=_CALL_SECONDS)
        connection.sendall(bytes.fromhex(told["token"]))
    except OSError as error:
        raise PeerLostError(
            f"{who} cannot be reached from {socket.gethostname()} at {host}, port {port} ({error}): set"
            f" {INTERFACE_VARIABLE} on all machines to the network interface that connects them, and let a firewall"
            " pass it"
        ) from None
    return connection


def network_address() -> str:
    """This machine's address in the network that gloo uses: of the interface that was named, or of the host's name."""
    if address := _address_of(os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0]):
        return address
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _shown(connection: socket.socket) -> bytes:
    """What a caller shows in time of the token."""
    connection.settimeout(_SHOW_SECONDS)
    received = b""
    with suppress(OSError):
        while len(received) < _TOKEN_BYTES and (part := connection.recv(_TOKEN_BYTES - len(received))):
            received += part
    return received


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; ``None`` if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
