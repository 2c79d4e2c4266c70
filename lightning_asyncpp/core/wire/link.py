"""Byte stream between two neighbouring stages, with frames, headers and layouts.

A message begins with a frame: its kind, number and size. The header of an activation has the microbatch's weight and
a fingerprint (hash) of the batch or microbatch. A layout describes an activation's tensors (shapes, dtypes) and the
containers around them. It is sent before the first activation, and again whenever it changes. Layouts include the order
of each tensor's dimensions in memory (transposed, channels last): with another order, matrix products would round
differently than in a single process, and convolutions would be slower.
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
"""Timeout in seconds that means no limit, as in the kernel's socket options."""
Bytes = bytes | bytearray | memoryview
Order = tuple[int, ...]
"""Dimensions by decreasing stride; empty for a row-major tensor."""
_NUMBERS = struct.Struct("<dq")
HEADER_BYTES = _NUMBERS.size


class Frame(NamedTuple):
    """Frame before a message: kind, number (usually of a microbatch or mini-batch), and size of the rest in bytes."""

    kind: int
    number: int
    num_bytes: int


class Link:
    """One end of a connection to a neighbour.

    Args:
        connection: connected stream socket, which the link owns.
        peer: name of the other end in messages.
        timeout: longest wait for the other end, in seconds, or ``NO_TIMEOUT``; default: half an hour.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: float | None = None) -> None:
        self.peer = peer
        self.timeout = _DEFAULT_TIMEOUT if timeout is None else timeout
        self._socket = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # unread part of the buffer
        self._backlog = _Backlog(connection)
        if connection.family == socket.AF_INET:  # tests use pairs of local sockets
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's timeouts, since Python's would cost another system call before every read.
        connection.setblocking(True)
        seconds = struct.pack("@ll", int(self.timeout), int(self.timeout % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, seconds)

    def write(self, kind: int, number: int, parts: Sequence[Bytes]) -> None:
        """Send a message without waiting.

        Args:
            kind: kind in the frame.
            number: number in the frame.
            parts: bytes of the message, which may change after the call.

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
        """Wait until at most ``limit`` parts of messages are unsent.

        Raises:
            PeerLostError: the connection is broken, or the other end did not read for ``timeout`` seconds.
        """
        try:
            self._backlog.wait(limit)
        except OSError as error:
            raise peer_lost(self.peer, error) from None

    def read_frame(self) -> Frame:
        """Wait for the next message's frame; :meth:`read_into` must then read exactly its ``num_bytes`` bytes.

        Raises:
            PeerLostError: the connection is broken, or nothing arrived for ``timeout`` seconds.
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
        """Wait for the next bytes, and fill ``view`` with them.

        Raises:
            PeerLostError: see :meth:`read_frame`.
        """
        filled = min(view.nbytes, self._end - self._start)
        view[:filled] = self._buffer[self._start : self._start + filled]
        self._start += filled
        while filled < view.nbytes:
            filled += self._receive(view[filled:])

    def abort(self) -> None:
        """Shut the connection down, so that waits on both ends raise an error; may be called from any thread."""
        with suppress(OSError):  # already broken
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection once its backlog is sent; sent messages still arrive."""
        self._backlog.close()

    def _send_later(self, parts: Sequence[Bytes], sent: int) -> None:
        """Pass all bytes after the first ``sent`` bytes to the backlog, since the socket did not accept them."""
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
    """Bytes that a socket did not accept at once, and a thread that sends them.

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
        """Add parts to be sent."""
        with self._changed:
            self._raise_error()
            self.parts.extend(parts)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def wait(self, limit: int) -> None:
        """Wait until at most ``limit`` parts remain."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self.parts) <= limit)
            self._raise_error()

    def close(self) -> None:
        """Close the socket after the last part is sent."""
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
                    self.parts.popleft()  # not earlier, or a later write could overtake it
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
    """Description of one tensor of an activation: shape, dtype, need for a gradient, and order in memory."""

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
        """Return the description of a tensor; gaps in its memory are not sent."""
        order: Order = () if tensor.is_contiguous() else tuple(tensor.dim_order())
        order = () if order == tuple(range(tensor.ndim)) else order
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this description."""
        if not self.order:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_permuted(self.shape, self.order, dtype=self.dtype, device=device)

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor for sending, with the dimensions in their order in memory."""
        return tensor.permute(self.order) if self.order else tensor


class Layout(NamedTuple):
    """Layout of an activation, which is sent only when it changes.

    Attributes:
        kind: a tensor, several tensors, an empty slot (place without samples), or a failure of an earlier stage.
        tensors: descriptions of the tensors that follow the header.
        structure: containers around several tensors, from :func:`lightning_asyncpp.core.tree.flatten`; for a failure,
            its message.
    """

    kind: int = 0
    tensors: tuple[TensorInfo, ...] = ()
    structure: bytes = b""

    def pack(self) -> bytes:
        """Return the layout as JSON."""
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
        k: number of the microbatch, counted over the run or over all evaluations.
        layout: layout of the activation.
        weight: weight w_k of the microbatch in the mean loss.
        fingerprint: hash of the first stage's batch or microbatch; 0 if none was computed.
    """

    k: int
    layout: Layout
    weight: float = 0.0
    fingerprint: int = 0

    TENSOR: ClassVar[int] = 0
    TUPLE: ClassVar[int] = 1
    EMPTY: ClassVar[int] = 2
    FAILED: ClassVar[int] = 3

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that follow, in bytes."""
        return sum([info.num_bytes for info in self.layout.tensors])

    def pack(self) -> bytes:
        """Return the fields that are not in the layout or the frame, as ``HEADER_BYTES`` bytes."""
        return _NUMBERS.pack(self.weight, self.fingerprint)

    @classmethod
    def read(cls, message: memoryview | bytearray | bytes, k: int, layout: Layout) -> Header:
        """Read what :meth:`pack` wrote."""
        return cls(k, layout, *_NUMBERS.unpack_from(message))


def written_out(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same values, with pending conjugation and negation applied."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, whatever the order of its dimensions in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
