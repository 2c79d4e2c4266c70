"""Links: every byte arrives once and in order, nobody waits for a reader without need, and a lost peer is noticed.

Stages find each other: over real process groups, twice in a row.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.link import Link
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import PeerLostError
from tests.helpers.pool import end_with_parent, free_port, worker_context

LARGE = 8 * 2**20  # more than both sockets hold


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Both ends of a connection."""
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


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_any_size_arrive_whole_and_in_order(ends: tuple[Link, Link], seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 23, 24, 25, 8191, 8192, 8193, 100_000, 3_000_000]) for _ in range(40)]
    messages = [draw.randbytes(size) for size in sizes]
    received: list[tuple[int, int, bytes]] = []
    reader = in_background(lambda: received.extend(read(ends[1]) for _ in messages))
    for number, message in enumerate(messages):
        cut = draw.randint(0, len(message))
        ends[0].write(number % 3, number, [message[:cut], memoryview(message)[cut:]])
    reader.join(20)
    assert received == [(number % 3, number, message) for number, message in enumerate(messages)]


def test_writing_waits_for_nobody_and_keeps_what_was_written(ends: tuple[Link, Link]) -> None:
    """The caller may write over its memory at once, though the socket has taken only a part."""
    message = bytearray(b"a" * LARGE)
    ends[0].write(1, 0, [message])
    message[:] = b"b" * LARGE
    assert read(ends[1]) == (1, 0, b"a" * LARGE)


def test_two_sides_that_both_send_before_they_read(ends: tuple[Link, Link]) -> None:
    """With blocking sends both would wait for ever."""
    received: dict[int, int] = {}

    def send_then_read(side: int) -> None:
        for number in range(3):
            ends[side].write(1, number, [bytes([side]) * LARGE])
        received[side] = sum(read(ends[side])[2] == bytes([1 - side]) * LARGE for _ in range(3))

    other = in_background(send_then_read, 1)
    send_then_read(0)
    other.join(20)
    assert received == {0: 3, 1: 3}


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


def test_every_transport_has_links_of_its_own() -> None:
    """What an earlier one left unread cannot be taken for a message of a later one."""
    assert _on_three_ranks(_sum_twice) == [6.0, 6.0]


def _sum_twice(mesh: Mesh) -> list[float]:
    totals = []
    for _ in range(2):
        transport = Transport(mesh, torch.device("cpu"), 2**20)
        own = torch.full((1,), float(mesh.stage + 1), dtype=torch.float64)
        part = own if mesh.is_last else own + transport.receive_part(0, 1)
        if mesh.is_first:
            transport.send_total(0, part)
            transport.send_total(9, part)  # nobody ever asks for this one
        else:
            transport.send_part(0, part)
            totals.append(float(transport.receive_total(0, 1)))
    return totals


def _on_three_ranks(function: Callable[[Mesh], Any]) -> Any:
    """What ``function`` returns on the last stage of three."""
    context, port = worker_context(), free_port()
    results = context.Queue()
    processes = [context.Process(target=_run, args=(rank, port, function, results), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        return results.get(timeout=60)
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()


def _run(rank: int, port: int, function: Callable[[Mesh], Any], results: Any) -> None:
    end_with_parent()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    mesh = Mesh(3, 1, rank)
    mesh.connect()
    outcome = function(mesh)
    if mesh.is_last:
        results.put(outcome)
    dist.barrier()
    dist.destroy_process_group()
