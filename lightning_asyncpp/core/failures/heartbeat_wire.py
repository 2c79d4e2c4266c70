"""The connection that signs of life travel on: short messages, checked before anything is done with them."""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from lightning_asyncpp.errors import ProtocolError

MAX_BODY = 2**17
"""Bytes of a message behind its frame that are accepted."""
_MAGIC = b"life"
_FRAME = struct.Struct(">4sBI")  # the magic, the kind, and the number of bytes that follow
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_READ_BYTES = 2**14
_SEND_SECONDS = 1.0


class Kind(IntEnum):
    """What a message says."""

    BEAT = 1
    """I am alive."""
    CAUSE = 2
    """This is what went wrong first."""
    GOODBYE = 3
    """I end as I should, and need nobody any more."""
    LEAVE = 4
    """My script wants to end here, in the middle of a run; or, from rank 0: those of all ranks do."""


class Message(NamedTuple):
    """One message."""

    kind: Kind
    body: bytes


class Wire:
    """One end of a connection; any thread may send, one reads.

    Args:
        connection: a connected stream socket; the wire owns it.

    Attributes:
        process: the process at the other end, where it is on this machine and can be seen from here.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        self.process = _process_of(connection)
        self._socket = connection
        self._received = b""
        self._sending = threading.Lock()
        _open.add(self)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken, or the other side has not read for long.
        """
        with self._sending:
            self._socket.sendall(_FRAME.pack(_MAGIC, kind, len(body)) + body)

    def receive(self) -> Iterator[Message]:
        """The messages that are complete with what came by now; to be called when there is something to read.

        Raises:
            EOFError: the other side closed the connection.
            ProtocolError: what came is no message.
            OSError: the connection is broken.
        """
        part = self._socket.recv(_READ_BYTES)
        if not part:
            raise EOFError("the connection was closed")
        self._received += part
        while len(self._received) >= _FRAME.size:
            magic, kind, size = _FRAME.unpack_from(self._received)
            if magic != _MAGIC or kind not in list(Kind) or size > MAX_BODY:
                raise ProtocolError(f"this is no sign of life: {self._received[: _FRAME.size]!r}")
            end = _FRAME.size + size
            if len(self._received) < end:
                return
            body, self._received = self._received[_FRAME.size : end], self._received[end:]
            yield Message(Kind(kind), body)

    def say_goodbye(self) -> None:
        """Send the last message; what the other side still sends can be read until it closes the connection."""
        with suppress(OSError):
            self.send(Kind.GOODBYE)
            self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the connection, from any thread: who waits for it on either side goes on."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection; what was sent still arrives."""
        self._socket.close()


# A forked process, such as a data loader's worker, would keep the connection open after its parent has died.
_open: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_all() -> None:
    for wire in list(_open):
        wire.close()


os.register_at_fork(after_in_child=_close_all)


def _process_of(connection: socket.socket) -> int | None:
    if not hasattr(socket, "SO_PEERCRED") or connection.family != socket.AF_UNIX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0]) or None
