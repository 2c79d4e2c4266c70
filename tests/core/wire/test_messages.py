"""Messages between neighbours arrive unchanged and in order; messages and outputs that do not fit are refused."""

from __future__ import annotations

import socket
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.tree import flatten, unflatten
from lightning_asyncpp.core.wire.connect import Neighbours
from lightning_asyncpp.core.wire.link import HEADER_BYTES, Header, Layout, Link, TensorInfo, memory_of, written_out
from lightning_asyncpp.core.wire.transport import Transport, arrived_at, begin
from lightning_asyncpp.errors import ConfigurationError, ProtocolError

CPU = torch.device("cpu")


def chain(stages: int) -> list[Transport]:
    """Return the transports of all stages of a pipeline in this process."""
    sockets = [socket.socketpair() for _ in range(stages - 1)]
    mesh = Mesh(stages, 1, 0)
    names = [mesh.name_of(mesh.rank_of(stage)) for stage in range(stages)]
    links = [(Link(a, names[i + 1], 5.0), Link(b, names[i], 5.0)) for i, (a, b) in enumerate(sockets)]
    transports = []
    for stage in range(stages):
        before = links[stage - 1][1] if stage else None
        after = links[stage][0] if stage + 1 < stages else None
        mesh = Mesh(stages, 1, stages - 1 - stage)
        transports.append(Transport(mesh, CPU, neighbours=Neighbours(before, after)))
    return transports


def header_of(k: int, tensors: tuple[Tensor, ...]) -> Header:
    kind = (Header.TENSOR if len(tensors) == 1 else Header.TUPLE) if tensors else Header.EMPTY
    return Header(k, Layout(kind, tuple(map(TensorInfo.of, tensors))), 1.0, 5)


def send(transport: Transport, k: int, *tensors: Tensor) -> None:
    transport.send_forward(header_of(k, tensors), tensors)


LAYOUTS: dict[str, tuple[Tensor, tuple[int, ...]]] = {  # a tensor, and its strides on arrival, without gaps
    "transposed": (torch.randn(4, 6).t(), (1, 6)),
    "channels last": (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
    "eight dimensions": (torch.randn(2, 1, 3, 1, 2, 1, 3, 2).permute(*range(7, -1, -1)), (1, 2, 6, 6, 12, 12, 36, 36)),
    "every other row": (torch.randn(6, 3)[::2], (3, 1)),
    "expanded": (torch.randn(3, 1).expand(3, 4), (4, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_and_gradients_lie_in_memory_as_they_would_without_a_cut(name: str) -> None:
    """With another memory layout, matrix products would round differently, and convolutions would be slower."""
    tensor, strides = LAYOUTS[name]
    first, last = chain(2)
    sent = tensor.detach().requires_grad_()
    send(first, 0, sent)
    (received,) = last.recv_forward(0).tensors
    assert torch.equal(received, tensor)
    assert [s for s, n in zip(received.stride(), tensor.shape) if n > 1] == [
        s for s, n in zip(strides, tensor.shape) if n > 1
    ]
    started, arrived = begin(received)
    (started * 3).backward(torch.ones_like(tensor, memory_format=torch.contiguous_format))
    last.send_backward(0, [arrived_at(arrived)])
    (gradient,) = first.recv_backward(0, (sent,))
    assert torch.equal(gradient, torch.full_like(tensor, 3.0))
    assert gradient.stride() == received.stride()


def test_sums_pass_through_every_stage_between_other_messages() -> None:
    """Partial sums follow gradients, totals precede activations, and sums that are read early are kept."""
    first, middle, last = chain(3)
    vector = torch.tensor([1.0, 2.0], dtype=torch.float64)
    output = (torch.zeros(2, requires_grad=True),)
    last.send_partial_sum(0, vector)
    last.send_backward(0, [torch.ones(2)])
    assert torch.equal(middle.recv_backward(0, output)[0], torch.ones(2))
    middle.send_partial_sum(0, middle.receive_partial_sum(0) + vector)
    total = first.receive_partial_sum(0) + vector
    first.send_total(0, total)
    send(first, 1, torch.ones(1))
    send(middle, 1, middle.recv_forward(1).tensors[0])  # reads the total first, and passes it on
    assert torch.equal(middle.receive_total(0), 3 * vector)
    assert torch.equal(last.receive_total(0), 3 * vector)
    assert torch.equal(last.recv_forward(1).tensors[0], torch.ones(1))


def test_ends_are_found_behind_activations_and_between_sums() -> None:
    first, middle, last = chain(3)
    vector = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for transport in (first, middle, last):  # before any batch has run
        transport.announce_end()
        transport.expect_end()
    send(first, 6, torch.ones(1))
    first.send_total(1, vector)
    first.announce_end()
    first.send_total(2, 2 * vector)
    send(middle, 6, middle.recv_forward(6).tensors[0])
    middle.announce_end()
    middle.expect_end()
    last.recv_forward(6)
    last.expect_end()
    for transport in (middle, last):
        assert torch.equal(transport.receive_total(2), 2 * vector)
        assert torch.equal(transport.receive_total(1), vector)


def wrong_microbatch() -> None:
    first, last = chain(2)
    send(first, 3, torch.ones(1))
    last.recv_forward(2)


def wrong_gradient() -> None:
    first, last = chain(2)
    last.send_backward(1, [torch.zeros(2)])
    first.recv_backward(0, (torch.zeros(2),))


def wrong_call() -> None:
    first, last = chain(2)
    send(first, 0, torch.ones(1))
    last.receive_total(0)


def part_for_a_total() -> None:
    """Send a partial sum, which belongs after gradients, where a total belongs; as a total, it would count twice."""
    first, last = chain(2)
    link = first._next
    assert link is not None
    link.write(3, 1, [bytes(16)])
    last.receive_total(1)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (wrong_microbatch, "expected microbatch 2 from the stage before, got 3"),
        (wrong_gradient, "expected the gradient of microbatch 0 with 8 bytes"),
        (wrong_call, "ranks are in different calls: expected a sum from .*, got an activation"),
        (part_for_a_total, r"expected a sum from .*stage 0.*, got a part of a sum"),
    ],
)
def test_what_does_not_fit_ends_the_run(mistake: Callable[[], None], message: str) -> None:
    """A message that does not fit is never taken for another one."""
    with pytest.raises(ProtocolError, match=message):
        mistake()


# -- autograd graphs of received tensors ------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64]


def test_a_header_comes_back_as_it_was() -> None:
    infos = tuple(TensorInfo((2**40, 0, 3), dtype, dtype.is_floating_point, (2, 0, 1)) for dtype in DTYPES)
    header = Header(2**50, Layout(Header.TUPLE, infos, ("ä" * 500).encode()), 1 / 3, 2**62 - 1)
    layout, message = Layout.read(header.layout.pack()), header.pack()
    assert layout == header.layout
    assert len(message) == HEADER_BYTES
    assert Header.read(message, header.k, layout) == header


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(8.0)[::8], torch.arange(6.0).view(2, 3).t(), torch.randn(1, dtype=torch.complex64).conj().imag,
     torch.randn(3, dtype=torch.complex128).conj(), torch.zeros(0, 3)],
    ids=["one of many", "transposed", "negative", "conjugated", "empty"],
)  # fmt: skip
def test_any_view_is_written_out(tensor: torch.Tensor) -> None:
    memory = memory_of(written_out(tensor)).numpy().tobytes()
    assert memory == tensor.numpy(force=True).copy().tobytes()


Pair = namedtuple("Pair", ["x", "y"])

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("aé\n", max_size=5)
trees = st.recursive(
    plain | st.integers(0, 9).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("aé\n", max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(trees)
def test_what_is_taken_apart_is_put_together(tree: Any) -> None:
    whole = (torch.zeros(2), tree)
    tensors, structure = flatten(whole, "layer")
    assert repr(unflatten(list(tensors), structure)) == repr(whole)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (Pair(torch.zeros(1), 2), "the named tuple Pair"),
        ((torch.zeros(1), np.float32(2)), "float32"),
        ({0: torch.zeros(1)}, "a dict with the key 0"),
        ((None, 1), "tuple without a tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(output: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"a layer at a cut returned {text} \(layer 'blocks.3'\)"):
        flatten(output, "blocks.3")
