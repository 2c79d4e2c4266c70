"""Headers: what is encoded comes back, anything else is refused."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core.batches.structure import MAX_STRUCTURE_BYTES
from lightning_asyncpp.core.wire.header import (
    BEGINNING_BYTES,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    Header,
    TensorInfo,
    as_bytes,
    describe,
    written_out,
)
from lightning_asyncpp.errors import ConfigurationError, ProtocolError

LARGE = 2**62
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def infos(draw: st.DrawFn) -> TensorInfo:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=MAX_DIMENSIONS)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    dtype = draw(st.sampled_from(DTYPES))
    needs_gradient = dtype.is_floating_point and draw(st.booleans())
    return TensorInfo(shape, dtype, needs_gradient, () if order == tuple(sorted(order)) else order)


headers = st.builds(
    Header,
    k=st.integers(0, 2**50),
    kind=st.just(Header.TUPLE),
    weight=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    fingerprint=st.integers(0, 2**62 - 1),
    tensors=st.lists(infos(), min_size=1, max_size=20).map(tuple),
    structure=st.binary(max_size=1000),
)


def written(header: Header) -> bytearray:
    message = bytearray(header.pack())
    assert len(message) == BEGINNING_BYTES + Header.rest_of(message[:BEGINNING_BYTES])
    return message


@given(headers)
def test_round_trip(header: Header) -> None:
    assert Header.read(written(header), header.k, LARGE) == header


def test_the_largest_header() -> None:
    info = TensorInfo((1,) * MAX_DIMENSIONS, torch.float32, True, tuple(reversed(range(MAX_DIMENSIONS))))
    header = Header(3, Header.TUPLE, tensors=(info,) * MAX_TENSORS, structure=b"x" * MAX_STRUCTURE_BYTES)
    assert len(written(header)) == MAX_HEADER_BYTES
    assert Header.read(written(header), 3, LARGE) == header


def test_a_common_header_is_small() -> None:
    assert len(VALID.pack()) == 152


@pytest.mark.parametrize("kind", [Header.EMPTY, Header.FAILED])
def test_headers_that_announce_nothing(kind: int) -> None:
    assert Header.read(written(Header(4, kind)), 4, 0) == Header(4, kind)


VALID = Header(3, Header.TENSOR, 2.5, 77, (TensorInfo((2, 3), torch.float32, True),))
FIRST_TENSOR = 7  # magic, kind, k, weight, fingerprint, count, length of the structure
MALFORMED = {
    "not a header": (0, 12345, "not an activation header"),
    "negative kind": (1, -1, "not an activation header"),
    "unknown kind": (1, 4, "not an activation header"),
    "another micro-batch": (2, 4, "different calls: expected micro-batch 3 from the stage before, got 4"),
    "negative count": (5, -1, "not an activation header"),
    "too many tensors": (5, MAX_TENSORS + 1, "not an activation header"),
    "negative structure": (6, -1, "not an activation header"),
    "too long a structure": (6, MAX_STRUCTURE_BYTES + 1, "not an activation header"),
    "no tensor": (5, 0, "contradict each other"),
    "unknown dtype": (FIRST_TENSOR, 12, "malformed description"),
    "negative dtype": (FIRST_TENSOR, -1, "malformed description"),
    "a dimension twice": (FIRST_TENSOR + 2, 0b001_001, "order in memory is none"),
    "a dimension that it does not have": (FIRST_TENSOR + 2, 0b010_000, "order in memory is none"),
    "more dimensions in order": (FIRST_TENSOR + 2, 0b010_000_001, "order in memory is none"),
    "negative order": (FIRST_TENSOR + 2, -1, "order in memory is none"),
    "too many dimensions": (FIRST_TENSOR + 3, MAX_DIMENSIONS + 1, "malformed description"),
    "negative dimensions": (FIRST_TENSOR + 3, -1, "malformed description"),
    "negative size": (FIRST_TENSOR + 4, -2, "malformed description"),
    "neither true nor false": (FIRST_TENSOR + 1, 2, "malformed description"),
    "a size behind the last dimension": (FIRST_TENSOR + 6, 1, "malformed description"),
    "more elements than can be counted": (FIRST_TENSOR + 4, 2**62, "malformed description"),
    "huge tensor": (FIRST_TENSOR + 4, 2**40, "more than max_message_bytes=1024"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers_are_refused(name: str) -> None:
    position, value, message = MALFORMED[name]
    encoded = written(VALID)
    assert Header.read(encoded, 3, 1024) == VALID
    struct.pack_into("<q", encoded, 8 * position, value)
    with pytest.raises(ProtocolError, match=message):
        Header.read(encoded, 3, 1024)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=19, max_size=19))
def test_noise_is_refused(numbers: list[int]) -> None:
    with pytest.raises(ProtocolError, match="not an activation header"):
        Header.read(bytearray(struct.pack("<19q", *numbers)), 0, LARGE)


@pytest.mark.parametrize(
    "header",
    [
        Header(3, Header.TENSOR),
        Header(3, Header.TENSOR, tensors=VALID.tensors * 2),
        Header(3, Header.EMPTY, tensors=VALID.tensors),
        Header(3, Header.TUPLE, structure=b'["tuple",[]]'),
        Header(3, Header.TENSOR, tensors=VALID.tensors, structure=b"xyz"),
        Header(3, Header.TENSOR, tensors=(TensorInfo((0, 2**31, 2**31), torch.float32, False),)),
        Header(3, Header.TENSOR, tensors=(TensorInfo((2,), torch.int64, True),)),
        Header(3, Header.TENSOR, weight=float("nan"), tensors=VALID.tensors),
        Header(3, Header.TENSOR, weight=-1.0, tensors=VALID.tensors),
    ],
    ids=[
        "tensor of none",
        "tensor of two",
        "empty slot with tensors",
        "tuple of none",
        "structure of one tensor",
        "around an empty dimension",
        "gradient of integers",
        "no weight",
        "negative",
    ],
)
def test_contradictory_headers_are_refused(header: Header) -> None:
    with pytest.raises(ProtocolError):
        Header.read(written(header), 3, LARGE)


def test_the_limit_counts_all_tensors() -> None:
    infos = (TensorInfo((4,), torch.float32, False), TensorInfo((3,), torch.int8, False))
    header = Header(0, Header.TUPLE, tensors=infos)
    assert Header.read(written(header), 0, 19) == header
    with pytest.raises(ProtocolError, match="announces 19 bytes, more than max_message_bytes=18"):
        Header.read(written(header), 0, 18)


def test_describe() -> None:
    tensors = (torch.zeros(2, 3, requires_grad=True), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 3).t())
    assert describe(tensors, "2") == (
        TensorInfo((2, 3), torch.float32, True),
        TensorInfo((4,), torch.int32, False),
        TensorInfo((3, 2), torch.float32, False, (1, 0)),
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((torch.zeros(1),) * (MAX_TENSORS + 1), "returned 257 tensors; at most 256 .*partition="),
        ((torch.zeros([1] * (MAX_DIMENSIONS + 1)),), "cannot cross a cut: .*partition="),
        ((torch.zeros(2, dtype=torch.uint16),), "dtype torch.uint16 .* which cannot cross a cut: .* one of float32, "),
        ((torch.eye(3).to_sparse(),), "layout torch.sparse_coo, which cannot cross a cut: .* must be dense"),
    ],
    ids=["tensors", "dimensions", "dtype", "layout"],
)
def test_describe_refuses_what_a_header_cannot_say(tensors: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"layer 'model.2' .*{message}"):
        describe(tensors, "model.2")


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(8.0)[::8], torch.arange(6.0).view(2, 3).t(), torch.randn(1, dtype=torch.complex64).conj().imag,
     torch.randn(3, dtype=torch.complex128).conj(), torch.zeros(0, 3)],
    ids=["one of many", "transposed", "negative", "conjugated", "empty"],
)  # fmt: skip
def test_any_view_is_written_out(tensor: torch.Tensor) -> None:
    memory = as_bytes(written_out(tensor)).numpy().tobytes()
    assert memory == tensor.numpy(force=True).copy().tobytes()
