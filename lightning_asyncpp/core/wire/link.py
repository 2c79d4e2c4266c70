"""A byte stream between two neighbouring stages, and what stands in front of what it carries: frames and headers.

A header says of an activation how much it weighs and which batch it belongs to. What comes, a layout, is sent before
the first activation and whenever it changes: shapes and dtypes of the tensors, and what was around them. It tells in
which order the dimensions of a tensor lie in memory, too. Where the next stage had them otherwise than a single process
(transposed, or with the channels last), a product of matrices would be rounded differently, and a convolution would be
slower.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.errors import peer_lost

_PREFIX = struct.Struct("<qqq")
_BUFFER_BYTES = 8192
_DEFAULT_TIMEOUT = 1800.0
NO_TIMEOUT = 0.0
"""Seconds, as the kernel takes them: a wait does not end by itself."""
Bytes = bytes | bytearray | memoryview
Order = tuple[int, ...]
"""Dimensions, the one with the largest stride first; empty: as they are numbered, which nearly all tensors are."""
_NUMBERS = struct.Struct("<dq")
HEADER_BYTES = _NUMBERS.size


class Frame(NamedTuple):
    """Frame before a message: its kind, its microbatch or mini-batch, and its size in bytes."""

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
        message: list[Bytes] = [_PREFIX.pack(kind, number, size), *parts]
        sent = 0
        try:
            if not self._backlog.parts:
                sent = self._socket.sendmsg(message, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            raise peer_lost(self.peer, error) from None
        if sent < _PREFIX.size + size:
            self._send_later(message, sent)

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

    def _send_later(self, parts: Sequence[Bytes], sent: int) -> None:
        """Leave to the backlog what the socket did not take, behind ``sent`` bytes."""
        rest: list[bytes] = []
        for part in parts:
            if sent < len(part):
                rest.append(bytes(part[sent:]))
            sent = max(0, sent - len(part))
        try:
            self._backlog.add(rest)
        except OSError as error:
            raise peer_lost(self.peer, error) from None

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


class _Backlog:
    """Bytes that a socket did not accept at once, and the thread that sends them, started when it is needed.

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


class TensorInfo(NamedTuple):
    """Shape, dtype, whether a gradient comes back, and the order in memory, of one tensor of an activation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    order: Order = ()

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """That of a tensor, which may have gaps; a copy without any is what travels."""
        order: Order = () if tensor.is_contiguous() else tuple(tensor.dim_order())
        order = () if order == tuple(range(tensor.ndim)) else order
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order)

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor that looks so."""
        if not self.order:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_permuted(self.shape, self.order, dtype=self.dtype, device=device)

    def stored(self, tensor: Tensor) -> Tensor:
        """A tensor that looks so, as it travels: with its dimensions as they lie in memory."""
        return tensor.permute(self.order) if self.order else tensor


class Layout(NamedTuple):
    """Layout of an activation: its kind, its tensors, and the structure around several tensors."""

    kind: int = 0
    tensors: tuple[TensorInfo, ...] = ()
    structure: bytes = b""

    def pack(self) -> bytes:
        """It as JSON."""
        tensors = [(i.shape, str(i.dtype).removeprefix("torch."), i.needs_gradient, i.order) for i in self.tensors]
        return json.dumps((self.kind, tensors, self.structure.decode())).encode()

    @classmethod
    def read(cls, message: bytes) -> Layout:
        """Read what :meth:`pack` wrote."""
        kind, tensors, structure = json.loads(message)
        infos = [
            TensorInfo(tuple(shape), getattr(torch, dtype), needs_gradient, tuple(order))
            for shape, dtype, needs_gradient, order in tensors
        ]
        return cls(kind, tuple(infos), structure.encode())


@dataclass(slots=True)
class Header:
    """Header before the tensors of microbatch ``k``.

    Attributes:
        k: the microbatch, counted over the run (training) or over the evaluation.
        kind: a tensor, several tensors, an empty slot, or the news that the stage before failed.
        weight: the microbatch's weight w_k.
        fingerprint: of the first stage's microbatch; 0 where it was not taken.
        tensors: what follows.
        structure: what was around several tensors, as :func:`lightning_asyncpp.core.tree.flatten`
            wrote it; or why the stage before failed.
    """

    k: int
    kind: int = 0
    weight: float = 0.0
    fingerprint: int = 0
    tensors: tuple[TensorInfo, ...] = ()
    structure: bytes = b""

    TENSOR: ClassVar[int] = 0
    TUPLE: ClassVar[int] = 1
    EMPTY: ClassVar[int] = 2
    FAILED: ClassVar[int] = 3

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that follow, in bytes."""
        return sum([info.num_bytes for info in self.tensors])

    @property
    def layout(self) -> Layout:
        """Layout of the activation, sent only when it changes."""
        return Layout(self.kind, self.tensors, self.structure)

    def pack(self) -> bytes:
        """The rest: ``HEADER_BYTES``."""
        return _NUMBERS.pack(self.weight, self.fingerprint)

    @classmethod
    def read(cls, message: memoryview | bytearray | bytes, k: int, layout: Layout) -> Header:
        """Read what :meth:`pack` wrote."""
        weight, fingerprint = _NUMBERS.unpack_from(message)
        return cls(k, layout.kind, weight, fingerprint, layout.tensors, layout.structure)


def written_out(tensor: Tensor) -> Tensor:
    """The same numbers without gaps, and without a conjugation or a sign that torch has noted and not yet applied."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor without gaps; a single number has none, whatever the stride of the view that took it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
