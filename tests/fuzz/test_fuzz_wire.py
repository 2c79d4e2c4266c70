"""Whatever a neighbour sends, there is a message that was agreed on, or an error that says what is wrong with it.

Real sockets, with somebody at the other end who sends mutated messages and closes the connection: a wait would be one
for ever. Nothing is allocated beyond what the limits allow.
"""

from __future__ import annotations

import json
import math
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.batches.structure import MAX_STRUCTURE_BYTES, flatten, unflatten
from lightning_asyncpp.core.ranks import rendezvous
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.rendezvous import Listener, call
from lightning_asyncpp.core.wire import header as header_module
from lightning_asyncpp.core.wire import transport as transport_module
from lightning_asyncpp.core.wire.header import BEGINNING_BYTES, Header, describe
from lightning_asyncpp.core.wire.link import Link, Neighbours
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import PeerLostError, ProtocolError

LIMIT = 4096  # of an activation, in bytes
SECONDS = 5.0
ACCEPTED = (ProtocolError, PeerLostError)
NUMBERS = (0, 1, -1, 2, 3, 4, 7, 8, 9, 16, 24, 255, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**31))
TENSORS: tuple[tuple[Tensor, ...], ...] = (
    (torch.ones(4),),
    (torch.ones(2, 3, requires_grad=True), torch.arange(5)),
    tuple(torch.ones(i % 3) for i in range(20)),
    (torch.zeros(0, 3), torch.ones(()), torch.ones(3, 2).t().to(torch.bfloat16), torch.ones(2, dtype=torch.bool)),
)
STRUCTURED: tuple[Any, ...] = (
    [torch.ones(1), {"a": torch.ones(2), "b": [None, 1, "x", 0.5, True]}],
    {"deep": ((((torch.ones(1),),),),), "text": "y" * 100},
)


@pytest.fixture(autouse=True)
def bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made that is larger than the limits: this counts where memory is asked for."""

    def checked(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def bounded(shape: Any, *arguments: Any, **options: Any) -> Tensor:
            count = math.prod(shape) if isinstance(shape, tuple) else shape
            assert count * options["dtype"].itemsize <= (LIMIT if isinstance(shape, tuple) else 2**24), shape
            return make(shape, *arguments, **options)

        return bounded

    for name in ("empty", "empty_permuted"):
        monkeypatch.setattr(torch, name, checked(getattr(torch, name)))


def frame(kind: int, number: int, size: int) -> bytes:
    return struct.pack("<qqq", kind, number, size)


def message(kind: int, number: int, content: bytes) -> bytes:
    return frame(kind, number, len(content)) + content


def activation(draw: random.Random, k: int) -> bytes:
    """One that a stage may send."""
    structure, kind = b"", Header.TUPLE
    if draw.random() < 0.3:
        tensors, structure = flatten(draw.choice(STRUCTURED), "layer")
    else:
        tensors = draw.choice(TENSORS)
        kind = Header.TENSOR if len(tensors) == 1 else Header.TUPLE
    if draw.random() < 0.1:
        tensors, structure, kind = (), b"", draw.choice((Header.EMPTY, Header.FAILED))
    content = Header(k, kind, draw.random(), draw.getrandbits(60), describe(tensors, "layer"), structure).pack()
    return message(1, k, content + b"".join(transport_module._bytes_of(tensor) for tensor in tensors))


def stream(draw: random.Random) -> bytes:
    """What a stage before sends for three micro-batches and their end, and what a stage after sends, all in one."""
    parts = [activation(draw, k) for k in range(3)]
    for number in range(draw.choice((0, 1, 3))):
        sums = message(draw.choice((3, 4)), number, bytes(8 * draw.choice((1, 4))))
        parts.insert(draw.randrange(len(parts) + 1), sums)
    if draw.random() < 0.3:
        parts.insert(draw.randrange(len(parts) + 1), message(2, 0, bytes(16)))
    if draw.random() < 0.1:
        parts.insert(draw.randrange(len(parts) + 1), message(5, draw.choice((0, 1, 3)), b""))
    return b"".join([*parts, message(5, 3, b"")])


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Numbers replaced, bits turned, pieces cut out, doubled or put elsewhere."""
    changed = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        if not changed:
            break
        what, place = draw.randrange(6), draw.randrange(len(changed))
        if what == 0:  # most fields are numbers of eight bytes; those in front matter most
            place = 8 * min(draw.choice((0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, draw.randrange(130))), len(changed) // 8)
            number = draw.choice((*NUMBERS, draw.getrandbits(63)))
            changed[place : place + 8] = struct.pack("<q", number)
        elif what == 1:
            changed[place] ^= 1 << draw.randrange(8)
        elif what == 2:
            del changed[place:]
        elif what == 3:
            del changed[place : place + draw.choice((1, 8, 24, BEGINNING_BYTES))]
        elif what == 4:
            changed[place:place] = changed[: draw.choice((8, 24, len(changed)))]
        else:
            changed[place : place + 8] = draw.randbytes(8)
    return bytes(changed)


def transport_with(sides: str) -> tuple[Transport, list[socket.socket]]:
    """A stage's transport, and the far ends of its links: before, after, or both."""
    ours, theirs = zip(*(socket.socketpair() for _ in sides))
    links = {side: Link(end, f"stage {side}", SECONDS) for side, end in zip(sides, ours)}
    mesh = {"b": Mesh(2, 1, 0), "a": Mesh(2, 1, 1), "ba": Mesh(3, 1, 1)}[sides]
    neighbours = Neighbours(links.get("b"), links.get("a"))
    return Transport(mesh, torch.device("cpu"), LIMIT, neighbours=neighbours), list(theirs)


def sent(connection: socket.socket, data: bytes) -> None:
    connection.settimeout(SECONDS)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def as_stage_behind(draw: random.Random) -> list[str]:
    """Receive activations, an end and a sum from the stage before; what arrives has the form that its header says."""
    transport, far = transport_with("ba" if draw.random() < 0.3 else "b")
    done = []
    try:
        sent(far[0], mutated(stream(draw), draw))
        for k in range(3):
            header, tensors = transport.receive_activation(k)
            assert [(tuple(t.shape), t.dtype) for t in tensors] == [(i.shape, i.dtype) for i in header.tensors]
            assert sum(t.nbytes for t in tensors) <= LIMIT
            if header.kind == Header.TUPLE:
                unflatten(list(tensors), header.structure)
            done.append("activation")
        transport.expect_end()
        done.append("end")
        assert transport.receive_total(0, 4).shape == (4,)
        done.append("sum")
    finally:
        close(transport, far)
    return done


def as_stage_in_front(draw: random.Random) -> list[str]:
    """Receive gradients and a sum from the stage after."""
    transport, far = transport_with("a")
    done = []
    try:
        outputs = tuple(t.detach().requires_grad_() for t in (torch.ones(2, 3), torch.ones(4)))
        size = sum(t.nbytes for t in outputs)
        parts = [message(2, k, bytes(size)) for k in range(3)]
        parts.insert(draw.randrange(4), message(draw.choice((3, 3, 4)), draw.choice((0, 0, 1)), bytes(32)))
        sent(far[0], mutated(b"".join(parts), draw))
        for k in range(3):
            assert [g.shape for g in transport.receive_gradients(k, outputs)] == [t.shape for t in outputs]
            done.append("gradient")
        assert transport.receive_part(0, 4).shape == (4,)
        done.append("sum")
    finally:
        close(transport, far)
    return done


def structure(draw: random.Random) -> list[str]:
    """Put together what is around tensors; what is accepted, is written again as it was read."""
    tensors, written = flatten(draw.choice(STRUCTURED), "layer")
    if draw.random() < 0.5:
        tree = [json.loads(written)]
        for _ in range(draw.choice((1, 2, 4))):
            _change(tree, draw)
        written = json.dumps(tree[0]).encode()[:MAX_STRUCTURE_BYTES]
    else:
        written = mutated(written, draw)[:MAX_STRUCTURE_BYTES]
    whole = unflatten(list(tensors), written)
    if written:
        again, same = flatten(whole, "layer")
        assert len(again) == len(tensors)
        assert json.loads(same or b"null") == json.loads(written) or not same
    return ["structure"]


def _change(node: Any, draw: random.Random) -> None:
    while isinstance(node, (list, dict)) and node:
        keys = list(range(len(node))) if isinstance(node, list) else list(node)
        key = draw.choice(keys)
        if draw.random() < 0.4 or not isinstance(node[key], (list, dict)):
            values: tuple[Any, ...] = (
                None,
                [],
                {},
                "list",
                "",
                0,
                -1,
                1.5,
                True,
                ["tuple", []],
                ["value", [1]],
                [None],
            )
            node[key] = draw.choice((*values, {"value": 1, "dict": 2}, [[[[[]]]]], node[key]))
            return
        node = node[key]


def close(transport: Transport, far: list[socket.socket]) -> None:
    transport.close()
    for end in far:
        end.close()


KINDS: dict[str, tuple[Callable[[random.Random], list[str]], set[str]]] = {
    "activations": (as_stage_behind, {"activation", "end", "sum"}),
    "gradients": (as_stage_in_front, {"gradient", "sum"}),
    "structures": (structure, {"structure"}),
}


def feed(kind: str, seed: int, count: int) -> None:
    """Feed mutated messages: each is taken, or refused with an error of ours; some of either."""
    function, possible = KINDS[kind]
    taken: set[str] = set()
    refused, waits = set(), 0
    for number in range(count):
        draw = random.Random(f"{kind} {seed} {number}")
        try:
            taken.update(function(draw))
        except ACCEPTED as error:
            refused.add(type(error))
            waits += "nothing came" in str(error)
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}, input {number}: {error!r}") from error
    assert not waits, "the other side had closed the connection"
    assert taken == possible
    assert ProtocolError in refused


@pytest.mark.parametrize("kind", KINDS)
def test_messages(kind: str) -> None:
    feed(kind, seed=1, count=400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_messages(kind: str) -> None:
    feed(kind, seed=2, count=20_000)


def callers(draw: random.Random, listener: Listener) -> Iterator[socket.socket]:
    """Strangers who say something or other."""
    for _ in range(draw.randrange(1, 6)):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(json.loads(listener.offer)["local"][0])
        stranger.sendall(draw.randbytes(draw.choice((0, 1, 15, 16, 17, 48, 49, 1000))))
        if draw.random() < 0.5:
            stranger.close()
        yield stranger


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated addresses are looked up and called, but nobody is asked for names, and nobody waited for."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, *_, **__: look_up(host, port, type=1, flags=socket.AI_NUMERICHOST)
    )
    monkeypatch.setattr(rendezvous, "_CALL_SECONDS", 0.02)


def shake_hands(seed: int, count: int) -> None:
    """Strangers and broken offers: the listener ends in time, and takes nobody for the right one."""
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        with Listener() as listener:
            strangers = list(callers(draw, listener))
            with pytest.raises(PeerLostError):
                listener.answer("rank 1", seconds=0.003)
            for stranger in strangers:
                stranger.close()
            offer = mutated(listener.offer.encode(), draw).decode(errors="replace")
            broken = json.dumps({"local": [], "network": [], "secret": "00"}) if draw.random() < 0.1 else offer
        with pytest.raises(ACCEPTED):
            call(broken, "rank 0", "rank 1")


@pytest.mark.usefixtures("no_names")
def test_strangers() -> None:
    shake_hands(1, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_names")
def test_many_strangers() -> None:
    shake_hands(2, 10_000)


def test_a_header_without_its_checks_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the fuzzing looks where it should: without a check it fails."""
    monkeypatch.setattr(header_module, "_decode_tensor", _careless)
    header_module._described.cache_clear()
    try:
        with pytest.raises(AssertionError):
            feed("activations", seed=1, count=400)
    finally:
        header_module._described.cache_clear()


def _careless(numbers: tuple[int, ...]) -> header_module.TensorInfo:
    dtype, needs_gradient, _, dimensions, *shape = numbers
    return header_module.TensorInfo(tuple(shape[:dimensions]), header_module.DTYPES[dtype], bool(needs_gradient))
