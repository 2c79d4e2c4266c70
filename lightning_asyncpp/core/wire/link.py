"""A byte stream between two neighbouring stages, written and read by the training thread itself.

A message over torch.distributed's gloo takes two threads to be woken on the receiving side, that of gloo and the one
that waits for it, and costs the sender a quarter of a millisecond. A socket that the waiting thread reads itself takes
one, and costs a fifth: between stages that run for milliseconds this is most of what a pipeline loses.

Writing never waits for the other side to read: what the socket does not take at once a thread sends on, whatever the
training thread waits for meanwhile. So two neighbours that both send do not block each other.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.rendezvous import connect_stages
from lightning_asyncpp.errors import peer_lost

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
