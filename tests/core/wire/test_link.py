"""Every byte arrives once and in order, a write does not wait for the reader, and a lost peer is noticed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_asyncpp.core.wire.link import Link
from lightning_asyncpp.errors import PeerLostError

LARGE = 8 * 2**20  # more than the buffers of both sockets hold


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Yield the two ends of a connection."""
    server = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(server.getsockname())
    there, _ = server.accept()
    server.close()
    links = Link(here, "rank 1", timeout=20.0), Link(there, "rank 2", timeout=20.0)
    yield links
    for link in links:
        link.close()


def read(link: Link) -> tuple[int, int, bytes]:
    frame = link.read_frame()
    message = bytearray(frame.num_bytes)
    link.read_into(memoryview(message))
    return frame.kind, frame.number, bytes(message)


def in_background(function: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_messages_of_any_size_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    draw = random.Random(0)
    sizes = [draw.choice([0, 1, 23, 24, 25, 8191, 8192, 8193, 100_000, 3_000_000]) for _ in range(80)]
    messages = [draw.randbytes(size) for size in sizes]
    received: list[tuple[int, int, bytes]] = []
    reader = in_background(lambda: received.extend(read(ends[1]) for _ in messages))
    for number, message in enumerate(messages):
        cut = draw.randint(0, len(message))
        ends[0].write(number % 3, number, [message[:cut], memoryview(message)[cut:]])
    reader.join(20)
    assert received == [(number % 3, number, message) for number, message in enumerate(messages)]


def test_what_is_unsent_goes_on_while_the_writer_does_something_else(ends: tuple[Link, Link]) -> None:
    """A stage that waits in a collective must not hold back messages that another stage needs to join it."""
    for number in range(3):
        ends[0].write(1, number, [bytes([number]) * LARGE])
    received = [read(ends[1]) for _ in range(3)]  # the writer makes no call meanwhile
    assert [(number, message[:1], len(message)) for _, number, message in received] == [
        (number, bytes([number]), LARGE) for number in range(3)
    ]


def test_what_is_unsent_arrives_though_the_writer_closes(ends: tuple[Link, Link]) -> None:
    ends[0].write(1, 0, [bytes(LARGE)])
    ends[0].close()
    assert read(ends[1]) == (1, 0, bytes(LARGE))
    with pytest.raises(PeerLostError):
        ends[1].read_frame()


@pytest.mark.parametrize("who", [0, 1], ids=["this side", "the other side"])
def test_hanging_up_ends_a_wait(ends: tuple[Link, Link], who: int) -> None:
    timer = threading.Timer(0.2, ends[who].abort)
    timer.start()
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="closed by peer"):
        ends[0].read_frame()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("waiting", ["read", "backlog", "write"])
def test_a_wait_ends_after_the_timeout(waiting: str) -> None:
    a, b = socket.socketpair()
    link, silent = Link(a, "rank 1", timeout=0.3), Link(b, "rank 2")

    def wait() -> None:
        if waiting == "read":
            link.read_frame()
        link.write(1, 0, [bytes(LARGE)])
        if waiting == "backlog":
            link.wait_for_backlog(0)
        time.sleep(0.6)
        link.write(1, 1, [b"more"])

    with pytest.raises(PeerLostError, match=r"rank 1 is gone.*(nothing came|did not read)"):
        wait()
    silent.close()
