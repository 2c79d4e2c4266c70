"""Error Feedback steps fp32 masters, writes the bf16 weights of forwards and backwards, and keeps one buffer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.optim import ErrorFeedback
from tests.helpers.programs import allocated

BASE = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def gradient(t: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(t))


def run(optimizer: Any, parameters: list[nn.Parameter], compute: list[Tensor], steps: range, idle: int = -1) -> None:
    """Step with fixed gradients; at step ``idle`` the last parameter has none."""
    for t in steps:
        for i, p in enumerate(parameters):
            p.grad = None if t == idle and p is parameters[-1] else gradient(10 * t + i, p.shape)
        with optimizer.compute_weights(dict(zip(parameters, compute))):
            optimizer.step()


def make(count: int = 2) -> tuple[list[nn.Parameter], list[Tensor]]:
    parameters = [nn.Parameter(gradient(100 + i, torch.Size((3, 4)))) for i in range(count)]
    return parameters, [p.detach().to(torch.bfloat16) for p in parameters]


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("idle", [-1, 2])
def test_error_feedback_moves_the_base_trajectory_and_writes_the_extrapolated_one(strength: float, idle: int) -> None:
    parameters, compute = make()
    optimizer = ErrorFeedback(parameters, BASE, strength=strength)
    plain, _ = make()
    reference = ErrorFeedback(plain, BASE, strength=strength)
    for t in range(5):
        run(optimizer, parameters, compute, range(t, t + 1), idle)
        for i, p in enumerate(plain):
            p.grad = None if t == idle and p is plain[-1] else gradient(10 * t + i, p.shape)
        reference.step()
        for written, p in zip(compute, plain):
            torch.testing.assert_close(written.float(), p.detach(), rtol=2**-8, atol=1e-6)
    assert not any(torch.allclose(p, q) for p, q in zip(parameters, plain))  # the masters are not extrapolated


def test_without_a_delay_the_masters_are_rounded() -> None:
    parameters, compute = make()
    optimizer = ErrorFeedback(parameters, BASE)
    optimizer.set_delay(0)
    run(optimizer, parameters, compute, range(2))
    assert all(torch.equal(written, p.detach().to(torch.bfloat16)) for written, p in zip(compute, parameters))
    optimizer.set_delay(1)  # as after a synchronous start
    run(optimizer, parameters, compute, range(2, 3))
    assert not any(torch.equal(written, p.detach().to(torch.bfloat16)) for written, p in zip(compute, parameters))


ELEMENTS = 2**20
MODEL_BYTES = 4 * ELEMENTS


@pytest.mark.parametrize(
    ("way", "buffer_dtype"),
    [("provided", None), ("provided", "bfloat16"), ("a snapshot", None), ("a snapshot", "bfloat16"), ("masters", None)],
)
def test_one_buffer_is_kept_and_no_temporary_is_made(way, buffer_dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_asyncpp.optim.error_feedback.CPU_CHUNK_ELEMENTS", ELEMENTS // 64)
    p = nn.Parameter(torch.ones(1024, ELEMENTS // 1024))
    p.grad = torch.ones_like(p)
    before, compute = p.detach().clone(), p.detach().to(torch.bfloat16)
    optimizer = ErrorFeedback([p], partial(torch.optim.SGD, lr=0.1, foreach=False), buffer_dtype=buffer_dtype)
    given = {
        "provided": lambda: optimizer.weights_before({p: before}),
        "a snapshot": nullcontext,
        "masters": lambda: optimizer.compute_weights({p: compute}),
    }

    def step():
        before.copy_(p.detach())
        with given[way]():
            optimizer.step()

    _, kept = allocated(step, tmp_path / "first.json")
    peak, kept_later = allocated(step, tmp_path / "second.json")
    assert kept == pytest.approx(MODEL_BYTES / (2 if buffer_dtype else 1), rel=0.01)  # the one buffer
    assert kept_later == pytest.approx(0, abs=0.01 * MODEL_BYTES)
    if way == "a snapshot":
        assert peak == pytest.approx(MODEL_BYTES, rel=0.1)
    else:
        assert peak < 0.1 * MODEL_BYTES
