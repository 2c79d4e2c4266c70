"""Parcels: both ends of a link agree on every message, whatever passes and whenever receives are posted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_asyncpp.pipeline.header import HEADER_BYTES, Header, describe
from lightning_asyncpp.pipeline.parcel import POSTED, Envelope, Parcels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
few_tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=3)
kinds_of_tensors = st.lists(few_tensors, min_size=1, max_size=3)


def filled(looks: list, value: int) -> tuple[Tensor, ...]:
    return tuple(torch.full(shape, value, dtype=torch.int64).to(dtype) for shape, dtype in looks)


def header_of(k: int, tensors: tuple[Tensor, ...]) -> Header:
    return Header(k, Header.TUPLE if tensors else Header.EMPTY, tensors=describe(tensors))


def packed(parcels: Parcels, number: int, tensors: tuple[Tensor, ...]) -> Envelope:
    """As the transport packs: inside if there is room, else the header alone."""
    header = header_of(number, tensors)
    return parcels.pack(number, header, tensors if parcels.holds(number, header.tensors) else ())


@given(kinds_of_tensors, st.lists(st.tuples(st.integers(0, 2), st.integers(0, POSTED - 1)), max_size=12))
def test_both_ends_agree(kinds: list, messages: list[tuple[int, int]]) -> None:
    """The receiver posts each receive before it has read the message before it, or a few more."""
    sender, receiver = Parcels(CPU), Parcels(CPU)
    sizes: list[int] = []
    for index, (kind, ahead) in enumerate(messages):
        while len(sizes) <= index + ahead:
            sizes.append(receiver.size(len(sizes)))
        tensors = filled(kinds[kind % len(kinds)], index)
        header = header_of(index, tensors)
        envelope = packed(sender, index, tensors)
        message = envelope.message.clone()  # as it arrives
        sender.reuse(envelope)
        sender.learn(index, header.tensors)
        assert len(message) == sizes[index]
        assert Header.read(message.numpy().data, index, 2**20) == header
        receiver.learn(index, header.tensors)
        assert receiver.holds(index, header.tensors) == sender.holds(index, header.tensors)
        if receiver.holds(index, header.tensors):
            unpacked = receiver.unpack(index, message)
            assert [t.dtype for t in unpacked] == [t.dtype for t in tensors]
            assert all(torch.equal(a, b) for a, b in zip(unpacked, tensors, strict=True))


def test_tensors_that_look_as_usual_are_inside() -> None:
    parcels = Parcels(CPU)
    usual, other = (torch.ones(2, 3, requires_grad=True), torch.arange(5)), (torch.ones(4),)
    infos = describe(usual)
    parcels.learn(3, ())
    parcels.learn(4, infos)
    assert [parcels.holds(number, infos) for number in range(4, 8)] == [False] * POSTED + [True, True]
    assert not parcels.holds(9, describe(other))
    parcels.learn(9, describe(other))
    assert parcels.holds(9, describe((torch.ones(2, 3), torch.arange(5)))), "whether a gradient comes back is no look"
    assert parcels.size(9) > HEADER_BYTES + 24 + 40
    assert len(packed(parcels, 9, other).message) == parcels.size(9)


def test_what_comes_twice_in_a_row_becomes_usual() -> None:
    """A validation of another size may come first; one batch of another size changes nothing."""
    parcels = Parcels(CPU)
    first, second = (describe((torch.ones(size),)) for size in (32, 4))
    for number, infos in enumerate([first, first, second, (), first, second, (), second, second]):
        parcels.learn(number, infos)
    assert parcels.holds(7 + POSTED - 1, first)
    assert not parcels.holds(7 + POSTED - 1, second)
    assert parcels.holds(7 + POSTED, second)
    assert not parcels.holds(7 + POSTED, first)


def test_an_envelope_of_another_format_is_not_used() -> None:
    parcels = Parcels(CPU)
    large, small = (torch.ones(32),), (torch.ones(4),)
    parcels.learn(0, describe(large))
    before = packed(parcels, 2, large)
    for number in (2, 3):
        parcels.learn(number, describe(small))
    parcels.reuse(before)
    assert packed(parcels, 4, small) is before, "as long as the old format counts"
    parcels.reuse(before)
    after = packed(parcels, 5, small)
    assert after is not before
    assert torch.equal(parcels.unpack(5, after.message)[0], small[0])


def test_for_autograd_the_tensors_of_a_parcel_are_apart() -> None:
    """Changing one in place spoils nothing that was saved of another, or in another mode."""
    parcels, tensors = Parcels(CPU), (torch.ones(3), torch.zeros(3))
    parcels.learn(0, describe(tensors))
    envelope = packed(parcels, POSTED, tensors)
    with torch.no_grad():
        x, auxiliary = parcels.unpack(POSTED, envelope.message)
    loss = (x.requires_grad_() ** 2).sum()
    auxiliary += loss.detach()
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_tensors_that_are_not_contiguous_are_packed_in_their_order() -> None:
    parcels = Parcels(CPU)
    turned = (torch.arange(6.0).view(2, 3).t(),)
    parcels.learn(0, describe(turned))
    envelope = packed(parcels, POSTED, turned)
    assert torch.equal(parcels.unpack(POSTED, envelope.message)[0], turned[0])


def test_an_envelope_is_used_again_only_once_it_is_given_back() -> None:
    parcels, tensors = Parcels(CPU), (torch.ones(2),)
    parcels.learn(0, describe(tensors))
    first, second = (packed(parcels, index, tensors) for index in (4, 5))
    assert first is not second
    parcels.reuse(first)
    assert packed(parcels, 6, tensors) is first


def test_tensors_elsewhere_than_on_a_cpu_travel_on_their_own() -> None:
    parcels = Parcels(CUDA)
    infos = describe((torch.ones(2),))
    parcels.learn(0, infos)
    assert not parcels.holds(9, infos)
    assert parcels.size(9) == HEADER_BYTES
