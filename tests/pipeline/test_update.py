"""From gradients to the one control message."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.pipeline.buckets import GradientBuckets
from lightning_asyncpp.pipeline.errors import PeerLostError
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.update import (
    PendingUpdate,
    StopFlags,
    clip_coefficient,
    gradient_norm,
    squared_norm,
)


def pending(gradients: dict[str, Any], weight: float = 2.0, stop: StopFlags | None = None) -> PendingUpdate:
    like = {name: torch.zeros(3) for name in gradients}
    payload = torch.tensor([4.0, 5.0], dtype=torch.float64)
    return PendingUpdate(Mesh(1, 1, 0), gradients, like, weight, stop or StopFlags(), payload)


def test_the_message_of_one_process() -> None:
    update = pending({"a": torch.tensor([3.0, 0.0, 0.0]), "b": torch.tensor([0.0, 4.0, 0.0]), "c": None})
    update.launch()
    message = update.finish()
    assert (message.weight, message.norm, message.finite) == (2.0, 2.5, True)
    assert (message.interrupted, message.finished) == (0, 0)
    assert message.payload.tolist() == [[4.0, 5.0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_no_number_is_noticed(value: float) -> None:
    update = pending({"a": torch.ones(3), "b": torch.tensor([0.0, value, 0.0])})
    update.launch()
    assert not update.finish().finite


@pytest.mark.parametrize("flag", ["interrupted", "finished"])
def test_flags_are_told_apart(flag: str) -> None:
    update = pending({"a": None}, stop=StopFlags(**{flag: True}))
    update.launch()
    message = update.finish()
    assert (message.interrupted, message.finished) == (flag == "interrupted", flag == "finished")


def test_norms_are_summed_in_double_precision() -> None:
    gradients = {"large": torch.tensor([1e4]), "small": torch.full((1000,), 1e-2)}
    assert squared_norm(gradients) == pytest.approx(1e8 + 1000 * float(torch.tensor(1e-2)) ** 2, rel=1e-14)
    assert squared_norm({"overflows in fp32": torch.tensor([1e30])}) == pytest.approx(1e60, rel=1e-6)


def test_a_mini_batch_without_weight_has_no_norm() -> None:
    assert gradient_norm(9.0, 0.0) == 0.0


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = torch.arange(5.0)
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], max_norm))
    expected = torch.arange(5.0) * clip_coefficient(norm, max_norm)
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bucket_bytes", [1, 20, 2**20])
def test_buckets_give_back_what_was_packed(bucket_bytes: int) -> None:
    gradients = {
        "a": torch.randn(2, 3), "none": None, "half": torch.randn(4).bfloat16(), "b": torch.randn(5),
        "half_none": None, "turned": torch.randn(3, 2).t(),
    }  # fmt: skip
    like = {name: torch.zeros(3) if g is None else g for name, g in gradients.items()}
    like["half_none"] = torch.zeros(3).bfloat16()
    unpacked = GradientBuckets(gradients, like, bucket_bytes).unpack()
    assert unpacked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (unpacked[name] is None) == (gradient is None)
        assert gradient is None or torch.equal(unpacked[name], gradient)


def test_a_gradient_that_one_replica_has_is_summed_with_nothing() -> None:
    like = {"a": torch.zeros(2), "b": torch.zeros(2)}
    first = GradientBuckets({"a": torch.ones(2), "b": None}, like)
    second = GradientBuckets({"a": None, "b": None}, like)
    first.flat[0] += second.flat[0]
    unpacked = first.unpack()
    assert unpacked["a"] is not None
    assert unpacked["a"].tolist() == [1.0, 1.0]
    assert unpacked["b"] is None


class Broken:
    """A reduction, or a sum of control messages, whose peer is gone."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("Connection reset by peer")

    def send(self, message: torch.Tensor) -> None:
        self.wait()

    def finish(self) -> torch.Tensor:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("method", ["poll", "finish"])
def test_a_peer_lost_in_the_reduction_is_named_so(method: str) -> None:
    update = pending({"a": torch.ones(3)})
    update._works = [Broken()]  # type: ignore[list-item]
    with pytest.raises(PeerLostError, match="a rank is gone"):
        getattr(update, method)()


@pytest.mark.parametrize("method", ["launch", "poll", "finish"])
def test_a_peer_lost_while_control_messages_are_sent_is_named_so(method: str) -> None:
    update = pending({"a": torch.ones(3)})
    update.exchange = Broken()
    with pytest.raises(PeerLostError, match="a rank is gone"):
        getattr(update, method)()


def test_a_peer_lost_while_their_sum_is_awaited_is_named_so() -> None:
    update = pending({"a": torch.ones(3)})
    update.launch()
    update.exchange = Broken()
    with pytest.raises(PeerLostError, match="closed by peer"):
        update.finish()
