"""How one rank calls another: addresses to try, and proof at both ends of who is there.

The rank that listens makes an offer, which reaches the caller over the process group: where to call, and a secret. The
caller tries the addresses in turn: first a local one, which only processes of the same machine, the same network
namespace and the same user reach and which is a third faster than a network address; then the network addresses, for
which of them others can reach, the machine does not know.

Both ends prove that they know the secret, which itself is never sent: each signs the numbers that both have just drawn.
Strangers who call are sent away, and one who says nothing holds up nobody.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress

from lightning_asyncpp.core.ranks.interfaces import INTERFACE_VARIABLE, named_addresses, own_addresses
from lightning_asyncpp.errors import PeerLostError, ProtocolError

_NUMBER_BYTES = 16
_PROOF_BYTES = 32
_CALL_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_MOST_CALLERS = 64
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Listener:
    """Listens for one caller, on the interface that was named, else on all of them, and on a local address.

    Attributes:
        offer: JSON for the caller, who gets it in a way that others cannot read.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_PROOF_BYTES)
        self._network = _listen_on_network()
        self._local = _listen_locally()
        local = [listener.getsockname().decode() for listener in self._local]
        offer = {"local": local, "network": self._network_addresses(), "secret": self._secret.hex()}
        self.offer = json.dumps(offer)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, who: str, seconds: float = _ANSWER_SECONDS) -> socket.socket:
        """Wait for the caller who knows the secret.

        Args:
            who: is to call, for messages.
            seconds: to wait.

        Raises:
            PeerLostError: nobody called who knows it.
        """
        deadline = time.monotonic() + seconds
        with _Callers([*self._network, *self._local], self._secret) as callers:
            while (left := deadline - time.monotonic()) > 0:
                if (connection := callers.proceed(left)) is not None:
                    return connection
        raise PeerLostError(f"{who} did not call within {seconds:g} seconds")

    def close(self) -> None:
        """Listen no longer; the connection that was made stays."""
        for listener in (*self._network, *self._local):
            listener.close()

    def _network_addresses(self) -> list[tuple[str, int]]:
        bound = [listener.getsockname()[:2] for listener in self._network]
        if named_addresses():
            return bound
        return [(host, bound[0][1]) for host in own_addresses()]


def call(offer: str, who: str, caller: str) -> socket.socket:
    """Connect with the rank that made an offer.

    Args:
        offer: of its :class:`Listener`.
        who: is called, for messages.
        caller: who calls, for messages.

    Raises:
        PeerLostError: it cannot be reached.
        ProtocolError: this is no offer.
    """
    secret, addresses = _read_offer(offer, who)
    tried = []
    for address in addresses:
        try:
            connection = _connect(address)
        except (OSError, ValueError, OverflowError) as error:  # no name, or no port, at all
            tried.append(f"{address} ({error})")
            continue
        try:
            if _introduce(connection, secret):
                return connection
            tried.append(f"{address} (somebody else)")
        except OSError as error:
            tried.append(f"{address} ({error})")
        connection.close()
    raise PeerLostError(
        f"{who} cannot be reached from {caller} at {', '.join(tried)}:"
        f" set {INTERFACE_VARIABLE} on all machines to the network interface that connects them, and let a firewall"
        " pass it"
    )


def _listen_on_network() -> list[socket.socket]:
    if addresses := named_addresses():
        return [socket.create_server((address, 0)) for address in addresses]
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return [socket.create_server(("", 0), family=family, dualstack_ipv6=dual)]


def _listen_locally() -> list[socket.socket]:
    if sys.platform != "linux":  # elsewhere a local address is a file, which somebody would have to remove
        return []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0asyncpp-" + secrets.token_hex(_NUMBER_BYTES))
    listener.listen()
    return [listener]


def _read_offer(offer: str, who: str) -> tuple[bytes, list[str | tuple[str, int]]]:
    try:
        read = json.loads(offer)
        network = [(str(host), int(port)) for host, port in read["network"]]
        return bytes.fromhex(read["secret"]), [*map(str, read["local"]), *network]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"{who} did not say where to call: {error!r}") from error


def _connect(address: str | tuple[str, int]) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=_CALL_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CALL_SECONDS)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _introduce(connection: socket.socket, secret: bytes) -> bool:
    """The caller's side: its number; the other's number and proof; its own proof. Whether the other one is right."""
    if not _is_same_user(connection):
        return False
    own = secrets.token_bytes(_NUMBER_BYTES)
    connection.sendall(own)
    reply = _read(connection, _NUMBER_BYTES + _PROOF_BYTES)
    number, proof = reply[:_NUMBER_BYTES], reply[_NUMBER_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"answer", own, number)):
        return False
    connection.sendall(_proof(secret, b"call", own, number))
    return True


class _Callers:
    """Those who called and have not proved yet who they are; nobody waits for any one of them.

    Args:
        listeners: where they call.
        secret: what the right one knows.
    """

    def __init__(self, listeners: list[socket.socket], secret: bytes) -> None:
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._callers: dict[socket.socket, _Caller] = {}  # in the order in which they called
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Callers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._callers):
            self._send_away(connection)
        self._selector.close()

    def proceed(self, seconds: float) -> socket.socket | None:
        """Wait so long for something to happen; returns the connection with the right one once it is known."""
        for key, _ in self._selector.select(seconds):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            caller = self._callers.get(connection)
            if caller is not None and (known := caller.proceed(self._secret)) is not None:
                if known:
                    self._forget(connection)
                    connection.setblocking(True)
                    return connection
                self._send_away(connection)
            elif caller is None and connection.fileno() >= 0:  # else it was sent away a moment ago
                self._accept(connection)
        return None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            if not _is_same_user(connection):
                connection.close()
                return
            if len(self._callers) >= _MOST_CALLERS:  # the right one needs milliseconds, and is not the oldest
                self._send_away(next(iter(self._callers)))
            self._callers[connection] = _Caller(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._callers[connection]

    def _send_away(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()


class _Caller:
    """The listener's side of a handshake, as far as it got.

    Args:
        connection: with somebody who called.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._received = b""
        self._number = secrets.token_bytes(_NUMBER_BYTES)
        self._replied = False

    def proceed(self, secret: bytes) -> bool | None:
        """Read what has come; returns whether it is the right one, ``None`` as long as it may still prove it."""
        try:
            part = self._connection.recv(_NUMBER_BYTES + self._replied * _PROOF_BYTES - len(self._received))
            self._received += part
            if not part:
                return False
            number, proof = self._received[:_NUMBER_BYTES], self._received[_NUMBER_BYTES:]
            if not self._replied and len(number) == _NUMBER_BYTES:
                self._replied = True
                self._connection.sendall(self._number + _proof(secret, b"answer", number, self._number))
        except OSError:
            return False
        if len(proof) < _PROOF_BYTES:
            return None
        return hmac.compare_digest(proof, _proof(secret, b"call", number, self._number))


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user; always over a network, which does not tell."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _proof(secret: bytes, role: bytes, callers: bytes, answerers: bytes) -> bytes:
    """That somebody in a role knows the secret, and has seen both numbers."""
    return hmac.digest(secret, role + callers + answerers, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    deadline = time.monotonic() + _CALL_SECONDS
    received = b""
    while len(received) < size and time.monotonic() < deadline:
        part = connection.recv(size - len(received))
        if not part:
            break
        received += part
    return received
