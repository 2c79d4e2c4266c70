"""The sleeps of the benchmark: where they happen, and that they are the same for all."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import pipelining

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Trace
from lightning_asyncpp.private_names import required
from lightning_asyncpp.tools.bench.harness.stage_layers import SleepingLayer, Sleeps, jitter_factor
from lightning_asyncpp.tools.bench.harness.systems import stage_indices
from lightning_asyncpp.tools.bench.names import RIVALS, SPLIT_BACKWARD


def slept(meter: Trace, kind: Kind) -> list[float]:
    """Milliseconds, rounded down: a sleep may last longer than asked."""
    times = [(span.end - span.start) * 1e3 for span in meter.spans if span.kind is kind]
    meter.spans.clear()
    return times


def test_torch_runs_the_sleep_of_the_input_gradient_and_that_of_the_weight_gradient_in_two_calls() -> None:
    backward = required(pipelining, "_backward", "test where a zero-bubble schedule sleeps")
    meter = Trace(0)
    layer = SleepingLayer(Sleeps(1.0, 20.0, weight_share=0.25), 4, meter)
    x = torch.ones(2, 4, requires_grad=True)
    output = layer(x)
    assert len(slept(meter, Kind.FORWARD)) == 1
    inputs, groups = backward.stage_backward_input((output,), [torch.ones(2, 4)], [x], layer.parameters())
    assert inputs[0] is not None
    assert layer.weight.grad is None
    (first,) = slept(meter, Kind.BACKWARD)
    backward.stage_backward_weight(layer.parameters(), groups)
    assert layer.weight.grad is not None
    (second,) = slept(meter, Kind.BACKWARD)
    assert first >= 15.0
    assert second >= 5.0
    assert first > second


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_gradients_are_those_of_a_multiplication_however_the_sleep_is_divided(share: float) -> None:
    meter = Trace(0)
    layer = SleepingLayer(Sleeps(0.0, 2.0, share), 3, meter)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert torch.equal(layer.weight.grad, torch.tensor([3.0, 5.0, 7.0]))
    assert sum(slept(meter, Kind.BACKWARD)) >= 2.0


def test_chunks_and_parts_sum_to_the_sleep_of_the_whole_stage_under_the_same_jitter() -> None:
    whole = Sleeps(20.0, 40.0, stage=3, jitter=0.2, seed=7)
    half = Sleeps(10.0, 20.0, 0.5, stage=3, jitter=0.2, seed=7)
    for k in range(5):
        forward, backward, none = whole.seconds(k)
        assert none == 0.0
        assert 2 * half.seconds(k)[0] == pytest.approx(forward)
        assert 2 * sum(half.seconds(k)[1:]) == pytest.approx(backward)


def test_jitter_is_the_same_for_the_same_work_and_only_for_that() -> None:
    factors = [
        jitter_factor(0.2, seed, stage, k, kind)
        for seed in (0, 1)
        for stage in range(4)
        for k in range(50)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert len(set(factors)) == len(factors)
    assert jitter_factor(0.2, 1, 2, 3, Kind.FORWARD) == jitter_factor(0.2, 1, 2, 3, Kind.FORWARD)
    assert jitter_factor(0.0, 1, 2, 3, Kind.FORWARD) == 1.0
    logarithms = torch.tensor(factors).log()
    assert float(logarithms.mean()) == pytest.approx(0.0, abs=0.03)
    assert float(logarithms.std()) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("system", RIVALS)
def test_every_stage_of_a_rival_is_on_one_rank(system: str) -> None:
    indices = [index for rank in range(4) for index in stage_indices(system, rank, 4)]
    assert sorted(indices) == list(range(len(indices)))
    assert len(indices) == (8 if system in (*SPLIT_BACKWARD, "interleaved") else 4)
