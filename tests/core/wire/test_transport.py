"""Messages between neighbours: what is sent arrives as it was, in order, and what does not fit is refused."""

from __future__ import annotations

import socket

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.connect import Neighbours
from lightning_asyncpp.core.wire.link import Header, Layout, Link, TensorInfo
from lightning_asyncpp.core.wire.transport import Transport, arrived_at, begin
from lightning_asyncpp.errors import PeerLostError, ProtocolError

CPU = torch.device("cpu")
SHAPES: list[tuple[int, ...] | None] = [(2, 3), (2, 3), None, (1, 3), (2, 3), None, None, (4,), (), (0, 5), (2, 3)]


def chain(stages: int) -> list[Transport]:
    """The transports of all stages of a pipeline, in this process."""
    sockets = [socket.socketpair() for _ in range(stages - 1)]
    names = [Mesh(stages, 1, 0).name_of(stage) for stage in range(stages)]
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
    return Header(k, kind, 1.0, 5, tuple(map(TensorInfo.of, tensors)))


def send(transport: Transport, k: int, *tensors: Tensor) -> None:
    transport.send_activation(header_of(k, tensors), tensors)


def link_of(transport: Transport, side: str) -> Link:
    link = transport._before if side == "before" else transport._after
    assert link is not None
    return link


def test_activations_of_changing_shapes_arrive_in_order() -> None:
    first, last = chain(2)
    sent = [() if shape is None else (torch.randn(shape),) for shape in SHAPES]
    for k, tensors in enumerate(sent):
        send(first, k, *tensors)
    for k, tensors in enumerate(sent):
        arrival = last.receive_activation(k)
        assert arrival.header == header_of(k, tensors)
        assert len(arrival.tensors) == len(tensors)
        assert all(torch.equal(a, b) for a, b in zip(arrival.tensors, tensors))


def test_a_layout_is_sent_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Layout] = []
    pack = Layout.pack
    monkeypatch.setattr(Layout, "pack", lambda self: packed.append(self) or pack(self))
    first, last = chain(2)
    for k in range(6):
        send(first, k, torch.zeros(2 + k // 3))
        last.receive_activation(k)
    assert [layout.tensors[0].shape for layout in packed] == [(2,), (3,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    first, last = chain(2)
    tensors = torch.arange(24).view(4, 6).t().to(dtype), torch.ones(3).to(dtype)
    send(first, 0, *tensors)
    arrival = last.receive_activation(0)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(arrival.tensors, tensors))


LAYOUTS: dict[str, tuple[Tensor, tuple[int, ...]]] = {  # and the strides that arrive: gaps are left out
    "transposed": (torch.randn(4, 6).t(), (1, 6)),
    "channels last": (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
    "channels last in 3d": (torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), (360, 1, 90, 18, 3)),
    "permuted, with a dimension of one": (torch.randn(3, 1, 4).permute(2, 1, 0), (1, 4, 4)),
    "eight dimensions": (torch.randn(2, 1, 3, 1, 2, 1, 3, 2).permute(*range(7, -1, -1)), (1, 2, 6, 6, 12, 12, 36, 36)),
    "every other row": (torch.randn(6, 3)[::2], (3, 1)),
    "every other column, transposed": (torch.randn(4, 6)[:, ::2].t(), (1, 3)),
    "expanded": (torch.randn(3, 1).expand(3, 4), (4, 1)),
    "a number": (torch.tensor(2.0), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_and_gradients_lie_in_memory_as_they_would_without_a_cut(name: str) -> None:
    """Products are rounded otherwise, and convolutions slower, where their input lies otherwise."""
    tensor, strides = LAYOUTS[name]
    first, last = chain(2)
    sent = tensor.detach().requires_grad_()
    send(first, 0, sent)
    (received,) = last.receive_activation(0).tensors
    assert torch.equal(received, tensor)
    assert [s for s, n in zip(received.stride(), tensor.shape) if n > 1] == [
        s for s, n in zip(strides, tensor.shape) if n > 1
    ]
    started, arrived = begin(received)
    (started * 3).backward(torch.ones_like(tensor, memory_format=torch.contiguous_format))
    last.send_gradients(0, [arrived_at(arrived)])
    (gradient,) = first.receive_gradients(0, (sent,))
    assert torch.equal(gradient, torch.full_like(tensor, 3.0))
    assert gradient.stride() == received.stride()


def test_gradients_of_another_layout_than_their_tensors() -> None:
    first, last = chain(2)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    send(first, 0, image.requires_grad_())
    started, arrived = begin(last.receive_activation(0).tensors[0])
    gradient = torch.randn(2, 3, 4, 5)
    started.backward(gradient)
    last.send_gradients(0, [arrived_at(arrived)])
    assert torch.equal(first.receive_gradients(0, (image,))[0], gradient)


def test_what_was_sent_may_change_afterwards() -> None:
    first, last = chain(2)
    tensor = torch.zeros(4 * 2**20)  # more than the sockets take at once
    send(first, 0, tensor)
    tensor += 1
    assert not bool(last.receive_activation(0).tensors[0].any())


def test_gradients_go_back_to_the_outputs_that_need_one() -> None:
    first, last = chain(2)
    outputs = torch.zeros(2, 3, requires_grad=True).t(), torch.zeros((), requires_grad=True)
    for k in (0, 1):
        last.send_gradients(k, [torch.full((3, 2), float(k)), torch.tensor(k + 0.5)])
    for k in (0, 1):
        matrix, number = first.receive_gradients(k, outputs)
        assert torch.equal(matrix, torch.full((3, 2), float(k)))
        assert float(number) == k + 0.5


def test_sums_pass_through_every_stage_between_other_messages() -> None:
    """Parts come behind gradients, totals in front of activations; nobody waits for what it has met already."""
    first, middle, last = chain(3)
    vector = torch.tensor([1.0, 2.0], dtype=torch.float64)
    output = (torch.zeros(2, requires_grad=True),)
    last.send_part(0, vector)
    last.send_gradients(0, [torch.ones(2)])
    assert torch.equal(middle.receive_gradients(0, output)[0], torch.ones(2))
    middle.send_part(0, middle.receive_part(0, 2) + vector)
    total = first.receive_part(0, 2) + vector
    first.send_total(0, total)
    send(first, 1, torch.ones(1))
    send(middle, 1, middle.receive_activation(1).tensors[0])  # it meets the total on the way
    assert torch.equal(middle.receive_total(0, 2), 3 * vector)
    assert torch.equal(last.receive_total(0, 2), 3 * vector)
    assert torch.equal(last.receive_activation(1).tensors[0], torch.ones(1))


def test_ends_are_found_behind_activations_and_between_sums() -> None:
    first, middle, last = chain(3)
    vector = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for transport in (first, middle, last):  # before anything was run
        transport.announce_end()
        transport.expect_end()
    send(first, 6, torch.ones(1))
    first.send_total(1, vector)
    first.announce_end()
    first.send_total(2, 2 * vector)
    send(middle, 6, middle.receive_activation(6).tensors[0])
    middle.announce_end()
    middle.expect_end()
    last.receive_activation(6)
    last.expect_end()
    for transport in (middle, last):
        assert torch.equal(transport.receive_total(2, 2), 2 * vector)
        assert torch.equal(transport.receive_total(1, 2), vector)


def test_nobody_is_asked_for_an_end_after_the_connections_were_closed() -> None:
    for transport in chain(3):
        transport.close()
        transport.announce_end()
        transport.expect_end()


def test_what_evaluations_receive_serves_there_and_training_goes_on() -> None:
    first, last = chain(2)
    for k in range(4):
        with torch.inference_mode(k < 2):
            send(first, k, torch.full((3,), float(k)))
            received = last.receive_activation(k).tensors[0]
            assert float(received[0]) == k
            if k >= 2:
                (received.requires_grad_() * 2).sum().backward()
                assert received.grad is not None


class TestRefusals:
    """What does not fit what was agreed on ends the run; it is never taken for something else."""

    def test_another_microbatch(self) -> None:
        first, last = chain(2)
        send(first, 3, torch.ones(1))
        with pytest.raises(ProtocolError, match="expected microbatch 2 from the stage before, got 3"):
            last.receive_activation(2)

    def test_a_gradient_of_another_size_or_microbatch(self) -> None:
        for k, size in ((0, 3), (1, 2)):
            first, last = chain(2)
            last.send_gradients(k, [torch.zeros(size)])
            with pytest.raises(ProtocolError, match="expected the gradient of microbatch 0 with 8 bytes"):
                first.receive_gradients(0, (torch.zeros(2),))

    def test_a_sum_where_an_activation_is_due_and_the_other_way_round(self) -> None:
        first, last = chain(2)
        send(first, 0, torch.ones(1))
        match = r"ranks are in different calls: expected a sum from .*, got an activation: .*made by some ranks only"
        with pytest.raises(ProtocolError, match=match):
            last.receive_total(0, 2)

    def test_an_end_where_a_further_batch_is_due_and_the_other_way_round(self) -> None:
        first, last = chain(2)
        for transport in (first, last):
            transport.announce_end()
        send(first, 0, torch.ones(1))
        usual = "Usually the data loaders have different numbers of batches.* StopIteration on one rank"
        match = rf"^this rank has ended before microbatch 0 .* rank 1 \(stage 0\) has a further batch\. {usual}"
        last.expect_end()
        with pytest.raises(ProtocolError, match=match):
            last.expect_end()
        first, last = chain(2)
        send(first, 5, torch.ones(1))
        first.announce_end()
        last.receive_activation(5)
        match = rf"^rank 1 \(stage 0\) has ended before microbatch 6 .* while this rank has a further batch\. {usual}"
        with pytest.raises(ProtocolError, match=match):
            last.receive_activation(6)

    def test_an_end_where_a_sum_is_due(self) -> None:
        first, last = chain(2)
        first.announce_end()
        with pytest.raises(ProtocolError, match=r"different calls: expected a sum from .*, got an end"):
            last.receive_total(0, 2)

    def test_an_end_before_another_microbatch(self) -> None:
        first, last = chain(2)
        send(first, 3, torch.ones(1))
        last.receive_activation(3)
        link_of(first, "after").write(5, 3, [])
        with pytest.raises(ProtocolError, match="it ended before microbatch 3, and 4 is the next"):
            last.expect_end()

    def test_what_the_first_stage_loaded(self) -> None:
        first, middle, _ = chain(3)
        for step in range(3):
            first.announce_loaded(step)
            assert middle.follow_loaded() == step

    def test_a_sum_of_another_length(self) -> None:
        first, last = chain(2)
        last.send_part(0, torch.zeros(3, dtype=torch.float64))
        with pytest.raises(ProtocolError, match="3 values instead of 2"):
            first.receive_part(0, 2)

    def test_a_sum_from_the_wrong_side(self) -> None:
        """A part belongs behind gradients, a total in front of activations; each would be summed up twice otherwise."""
        first, middle, last = chain(3)
        first.send_total(0, torch.zeros(2, dtype=torch.float64))
        link_of(last, "before").write(4, 0, [bytes(16)])
        with pytest.raises(ProtocolError, match=r"expected a part of a sum from .*stage 2.*, got a sum"):
            middle.receive_part(0, 2)
        link_of(first, "after").write(3, 1, [bytes(16)])
        with pytest.raises(ProtocolError, match=r"expected a sum from .*stage 0.*, got a part of a sum"):
            middle.receive_total(1, 2)

    def test_the_name_of_a_neighbour_that_is_gone(self) -> None:
        first, last = chain(2)
        last.close()
        with pytest.raises(PeerLostError, match=r"rank 0 \(stage 1\) is gone"):
            first.receive_part(0, 2)
        first, last = chain(2)
        first.abort()
        with pytest.raises(PeerLostError, match=r"rank 1 \(stage 0\) is gone"):
            last.receive_activation(0)
