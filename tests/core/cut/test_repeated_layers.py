"""Layers that stand in several places, share weights anywhere, or do not count every time."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.cases import DIM, Case, Routed
from tests.helpers.compare import assert_same_norms, assert_same_weights, weights_of
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools
from tests.helpers.random_layers import make


def layers(*kinds: str) -> partial[nn.Sequential]:
    return partial(make, tuple((kind, "tensor") for kind in kinds))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_dropout_layer_in_two_places_draws_anew_in_each(engine_pools: EnginePools, num_stages: int) -> None:
    case = Case(3, model=layers("linear", "same dropout", "linear", "same dropout"), dropout=0.3)
    assert_same_weights(engine_pools.run(case, num_stages), run_oracle(case)[0])


def test_a_layer_in_four_places_of_a_stage(engine_pools: EnginePools) -> None:
    case = Case(3, model=layers("linear", *["same module"] * 3), optimizer="counting")
    assert_same_weights(engine_pools.run(case, 1), run_oracle(case)[0])


def test_all_uses_count(engine_pools: EnginePools) -> None:
    """The reference itself: against plain backward passes over a whole batch, without a delay."""
    case = Case(1, delay=0, model=layers("linear", *["same module"] * 3, "as first"), optimizer="counting")
    model = case.make_model()
    optimizer = case.make_base(model.parameters())
    for i in range(len(case.batch_sizes)):
        optimizer.zero_grad()
        case.step(model)(case.batch(i)).backward()
        optimizer.step()
    expected, _ = run_oracle(case)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"error_feedback": 0.7, "max_norm": 0.3}, {"bf16": True}, {"delay": 0}])
def test_two_stages_share_that_are_not_the_first(engine_pools: EnginePools, options: dict) -> None:
    case = Case(4, model=layers("projection", "linear", "projection", "as last"), cut=(1, 2, 2), drains=(2,), **options)
    results = engine_pools.run(case, 3)
    assert_same_weights(results, run_oracle(case)[0])
    assert_same_norms(results)


SHARED_BY_ALL = ("linear", "projection", "as first", "as first", "experts", "as first", "as first")


@pytest.mark.parametrize(
    ("cut", "options"),
    [
        ((2, 2, 4), {"error_feedback": 0.7, "max_norm": 0.3, "drains": (2,), "resumes": (3,)}),
        ((3, 1, 1, 3), {"error_feedback": 0.7, "max_norm": 0.3, "accumulate": 2, "batch_sizes": (8,) * 6}),
        ((2, 1, 2, 3), {"bf16": True, "checkpointing": True}),
        ((4, 1, 3), {"delay": 0, "max_norm": 0.3}),
        ((4, 4), {"drains": (1,)}),
        ((8,), {"max_norm": 0.3}),
    ],
)
def test_three_stages_or_more_share_a_weight(engine_pools: EnginePools, cut: tuple[int, ...], options: dict) -> None:
    """Uses are added from the last layer to the first, wherever the model is cut."""
    case = Case(4, model=layers(*SHARED_BY_ALL), cut=cut, **options)
    results = engine_pools.run(case, len(cut))
    assert_same_weights(results, run_oracle(case)[0])
    assert_same_norms(results)


@pytest.mark.parametrize("cut", [(2, 2, 2), (1, 3, 2), (4, 2), (6,)])
def test_one_layer_everywhere(engine_pools: EnginePools, cut: tuple[int, ...]) -> None:
    case = Case(3, model=layers("linear", *["same module"] * 4), cut=cut, max_norm=0.3, error_feedback=1.0)
    results = engine_pools.run(case, len(cut))
    assert_same_weights(results, run_oracle(case)[0])
    assert_same_norms(results)


def test_three_stages_and_two_replicas_share_a_weight(engine_pools: EnginePools) -> None:
    """To rounding: replicas add a stage's uses before they reduce."""
    case = Case(
        3, model=layers(*SHARED_BY_ALL), cut=(2, 2, 4), data_parallel_size=2, max_norm=0.3, optimizer="counting"
    )
    results = engine_pools.run(case, 3)
    first, second = weights_of(results, 0), weights_of(results, 1)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(np.array_equal(np.asarray(c), first[n]) for r in results for n, c in r["copies"].items())
    expected, _ = run_oracle(case)
    for name, value in expected.items():
        np.testing.assert_allclose(first[name], value.numpy(), rtol=0, atol=1e-5)
    assert_same_norms(results)


class CountsSometimes(Routed):
    """Its buffer becomes another one with every update, also where it counted nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > 3 else x

    def update_from_statistics(self, totals: Tensor) -> None:
        self.bias = self.bias + 0.05 * torch.sign(totals[:3] - 2).to(self.bias)


def counting_sometimes(_: float) -> nn.Sequential:
    torch.manual_seed(5)
    counting = [CountsSometimes(), nn.Linear(DIM, DIM), CountsSometimes()]
    return nn.Sequential(nn.Linear(DIM, DIM), *counting, nn.Linear(DIM, 1))


@pytest.mark.parametrize("options", [{}, {"bf16": True, "resumes": (1,)}, {"drains": (1,)}])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_layer_that_counts_nothing_in_a_mini_batch_learns_from_that(
    engine_pools: EnginePools, num_stages: int, options: dict
) -> None:
    case = Case(3, model=counting_sometimes, batch_sizes=(3,) * 6, nan_at=3, **options)
    results = engine_pools.run(case, num_stages)
    assert_same_weights(results, run_oracle(case)[0])
    assert 0 in {metrics["samples"] for metrics in results[0]["statistics"]}
