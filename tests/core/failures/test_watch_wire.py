"""Signs of life are checked before anything is done with them, and accounts of errors are short."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from lightning_asyncpp.core.failures.cause import MAX_LINE, MAX_TRACE, Cause
from lightning_asyncpp.core.failures.heartbeat_wire import MAX_BODY, Kind, Message, Wire
from lightning_asyncpp.errors import ProtocolError


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire, and the socket at its other end."""
    here, there = socket.socketpair()
    wire = Wire(here)
    yield wire, there
    wire.close()
    there.close()


def test_messages_arrive_whole_in_whatever_pieces_they_come(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    sent = struct.pack(">4sBI", b"life", 1, 0) + struct.pack(">4sBI", b"life", 2, 3) + b"abc"
    received: list[Message] = []
    for position in range(len(sent)):
        there.sendall(sent[position : position + 1])
        received += wire.receive()
    assert received == [Message(Kind.BEAT, b""), Message(Kind.CAUSE, b"abc")]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">4sBI", b"life", 9, 0), struct.pack(">4sBI", b"life", 2, MAX_BODY + 1)],
    ids=["another protocol", "an unknown kind", "too large"],
)
def test_what_is_no_message_is_refused(ends: tuple[Wire, socket.socket], garbage: bytes) -> None:
    wire, there = ends
    there.sendall(garbage)
    with pytest.raises(ProtocolError, match="this is no sign of life"):
        list(wire.receive())


def test_a_goodbye_arrives_before_the_end(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    other = Wire(there)
    other.say_goodbye()
    assert list(wire.receive()) == [Message(Kind.GOODBYE, b"")]
    with pytest.raises(EOFError):
        list(wire.receive())
    wire.send(Kind.BEAT)
    assert list(other.receive()) == [Message(Kind.BEAT, b"")], "what was on its way can still be read"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_the_process_at_the_other_end_is_known_on_one_machine(ends: tuple[Wire, socket.socket]) -> None:
    assert ends[0].process == os.getpid()


def test_a_forked_process_does_not_keep_the_connection(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, b"open" if wire.fileno() >= 0 else b"shut")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 4) == b"shut"
    assert wire.fileno() >= 0
    wire.send(Kind.BEAT)
    assert there.recv(4) == b"life", "it is still open here"


def raised(text: str) -> Cause:
    try:
        raise ValueError(text)
    except ValueError as error:
        return Cause.raised(2, 1, error)


def test_an_error_is_told_with_its_traceback() -> None:
    cause = Cause.unpack(raised("the user's own mistake").pack())
    assert cause == raised("the user's own mistake")
    assert cause.line == "rank 2 (stage 1) failed first: ValueError: the user's own mistake"
    assert cause.text.startswith(cause.line)
    assert "in raised" in cause.text
    assert cause.text.endswith("    ValueError: the user's own mistake")


def test_a_rank_that_is_gone_has_no_traceback() -> None:
    cause = Cause(2, 1, "its process ended")
    assert cause.text == cause.line == "rank 2 (stage 1) is gone: its process ended"


@pytest.mark.parametrize("character", ["x", "\U0001f9df", "\0", "\n", "\ud800"])
def test_however_long_an_error_is_its_account_is_short(character: str) -> None:
    packed = raised(character * 2**20 + "the end").pack()
    assert len(packed) <= MAX_BODY
    cause = Cause.unpack(packed)
    assert len(cause.what) <= MAX_LINE
    assert len(cause.trace) <= MAX_TRACE + 10
    assert cause.trace.endswith("the end"), "the last lines of a traceback say most"


FIELDS = {"rank": 1, "stage": 0, "what": "", "trace": ""}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        json.dumps({**FIELDS, "rank": "1"}).encode(),
        json.dumps({**FIELDS, "trace": None}).encode(),
        json.dumps({**FIELDS, "more": 1}).encode(),
        json.dumps({"rank": 1}).encode(),
    ],
    ids=["nothing", "no text", "deep", "a list", "a wrong type", "a null", "a field too many", "fields missing"],
)
def test_what_is_no_account_of_an_error_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="this is no account of an error"):
        Cause.unpack(data)
