"""What travels with a micro-batch is set as it was; what nobody wrote is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core.step import ambient
from lightning_asyncpp.core.step.ambient import GRADIENTS, REFUSED, REFUSED_ONCE, Travelling
from lightning_asyncpp.errors import ProtocolError

TRAVELLING = Travelling(torch.device("cpu"))


def read() -> list[object]:
    return [reader() for reader in TRAVELLING.readers]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("enabled", [True, False])
def test_set_as_written(dtype: torch.dtype, enabled: bool) -> None:
    before = read()
    wanted = [enabled, dtype, not before[2], False, True, True, False]
    number = TRAVELLING.written(wanted)
    assert 0 < number < 2**63
    with suppress(KeyError), TRAVELLING.set_as(number):
        assert read() == wanted
        raise KeyError
    assert read() == before


def test_a_dtype_that_cannot_travel() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        TRAVELLING.written([True, torch.int8, True, True, True, True, True])


@given(st.integers(-(2**63), 2**63 - 1).filter(bool))
def test_noise(number: int) -> None:
    try:
        with TRAVELLING.set_as(number):
            assert TRAVELLING.written(read()) == number
    except ProtocolError as error:
        assert "not what may be set around a model" in str(error)  # noqa: PT017


def test_everything_can_be_read() -> None:
    for setting in (*GRADIENTS, *REFUSED, *REFUSED_ONCE):
        assert setting.read() == setting.read(), setting.what


def test_private_names() -> None:
    """Each is looked up where it would be missed when the package is imported."""
    assert ambient._saved_tensor_hooks(True) is None
    assert ambient._transforms() is None
    with torch.autograd.graph.save_on_cpu():
        assert ambient._saved_tensor_hooks(True) is not None
    with torch.nn.utils.parametrize.cached():
        assert ambient._parametrize["_cache_enabled"] == 1
    with torch.autograd.forward_ad.dual_level():
        assert ambient._forward_ad["_current_level"] == 0
