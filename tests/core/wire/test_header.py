"""Headers and layouts: what is written comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core.wire.link import HEADER_BYTES, Header, Layout, TensorInfo, memory_of, written_out

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64]


@st.composite
def infos(draw: st.DrawFn) -> TensorInfo:
    shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=10)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    dtype = draw(st.sampled_from(DTYPES))
    needs_gradient = dtype.is_floating_point and draw(st.booleans())
    return TensorInfo(shape, dtype, needs_gradient, () if order == tuple(sorted(order)) else order)


headers = st.builds(
    Header,
    k=st.integers(0, 2**50),
    kind=st.sampled_from([Header.TENSOR, Header.TUPLE, Header.EMPTY, Header.FAILED]),
    weight=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    fingerprint=st.integers(0, 2**62 - 1),
    tensors=st.lists(infos(), max_size=20).map(tuple),
    structure=st.text(st.characters(codec="utf-8"), max_size=1000).map(str.encode),
)


@given(headers)
def test_round_trip(header: Header) -> None:
    layout, message = Layout.read(header.layout.pack()), header.pack()
    assert layout == header.layout
    assert len(message) == HEADER_BYTES
    assert Header.read(message, header.k, layout) == header


def test_what_tensors_look_like() -> None:
    tensors = (torch.zeros(2, 3, requires_grad=True), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 3).t())
    assert [TensorInfo.of(tensor) for tensor in tensors] == [
        TensorInfo((2, 3), torch.float32, True),
        TensorInfo((4,), torch.int32, False),
        TensorInfo((3, 2), torch.float32, False, (1, 0)),
    ]


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(8.0)[::8], torch.arange(6.0).view(2, 3).t(), torch.randn(1, dtype=torch.complex64).conj().imag,
     torch.randn(3, dtype=torch.complex128).conj(), torch.zeros(0, 3)],
    ids=["one of many", "transposed", "negative", "conjugated", "empty"],
)  # fmt: skip
def test_any_view_is_written_out(tensor: torch.Tensor) -> None:
    memory = memory_of(written_out(tensor)).numpy().tobytes()
    assert memory == tensor.numpy(force=True).copy().tobytes()
