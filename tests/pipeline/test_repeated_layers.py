"""Layers that stand in several places, share weights anywhere, or do not count every time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.cases import DIM, Case, Routed
from tests.pipeline.compare import assert_same_norms, assert_same_weights
from tests.pipeline.conftest import Pools
from tests.pipeline.random_layers import make
from tests.pipeline.runs import run_oracle


def layers(*kinds: str) -> partial[nn.Sequential]:
    return partial(make, tuple((kind, "tensor") for kind in kinds))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_dropout_layer_in_two_places_draws_anew_in_each(pools: Pools, num_stages: int) -> None:
    case = Case(3, model=layers("linear", "same dropout", "linear", "same dropout"), dropout=0.3)
    assert_same_weights(pools.run(case, num_stages), run_oracle(case)[0])


def test_a_layer_in_four_places_of_a_stage(pools: Pools) -> None:
    case = Case(3, model=layers("linear", *["same module"] * 3), optimizer="counting")
    assert_same_weights(pools.run(case, 1), run_oracle(case)[0])


def test_all_uses_count(pools: Pools) -> None:
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
def test_two_stages_share_that_are_not_the_first(pools: Pools, options: dict) -> None:
    case = Case(4, model=layers("projection", "linear", "projection", "as last"), cut=(1, 2, 2), drains=(2,), **options)
    results = pools.run(case, 3)
    assert_same_weights(results, run_oracle(case)[0])
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


@pytest.mark.parametrize("options", [{}, {"bf16": True, "resumes": (1,)}, {"start": 2, "drains": (1,)}])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_layer_that_counts_nothing_in_a_mini_batch_learns_from_that(
    pools: Pools, num_stages: int, options: dict
) -> None:
    case = Case(3, model=counting_sometimes, batch_sizes=(3,) * 6, nan_at=3, **options)
    results = pools.run(case, num_stages)
    assert_same_weights(results, run_oracle(case)[0])
    assert 0 in {metrics["samples"] for metrics in results[0]["statistics"]}
