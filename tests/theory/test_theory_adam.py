"""Section 6 of docs/research/theory.md: what can be shown of Adam under delay on a small example."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_asyncpp.reference import train_reference
from tests.theory.iterations import Adam, Method
from tests.theory.problems import LeastSquares, adam_floor, adam_floors, measured_radius
from tests.theory.spectra import stability_limit


def step_bound(beta1: float, beta2: float, t: int) -> float:
    """Largest |u| / lr of Adam's update t = 1, 2, ...: Cauchy-Schwarz on the two sums, bias corrections included."""
    q = beta1**2 / beta2
    unbiased = math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt((1 - q**t) / (1 - q)) * unbiased


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.9, 0.999), (0.5, 0.95)])
def test_adams_step_is_bounded_and_the_bound_is_attained(beta1: float, beta2: float) -> None:
    generator, updates = np.random.default_rng(0), 60
    bounds = [step_bound(beta1, beta2, t + 1) for t in range(updates)]
    worst = (beta1 / beta2) ** np.arange(updates)[::-1]  # gradients that make Cauchy-Schwarz an equality at the end
    for gradients in (*generator.standard_cauchy((50, updates)), worst):
        rule = Adam(beta1, beta2)
        steps = np.array([rule(np.array([g]))[0] for g in gradients])
        assert (np.abs(steps) <= np.array(bounds) * (1 + 1e-9)).all()
    assert abs(steps[-1]) == pytest.approx(bounds[-1], rel=1e-9)


def test_adams_step_is_unbounded_where_beta1_squared_exceeds_beta2() -> None:
    assert step_bound(0.9, 0.95, 2000) == pytest.approx(1.165, abs=1e-3)  # below: it settles
    for updates, length in ((300, 10), (600, 80)):
        rule = Adam(0.9, 0.8)
        for gradient in (0.9 / 0.8) ** np.arange(updates)[::-1]:
            step = rule(np.array([gradient]))
        assert step[0] > length


def test_a_stale_gradient_meets_no_staler_second_moment() -> None:
    """torch's AdamW in the package's oracle: each step is synchronous Adam's on the sequence of stale gradients."""
    problem, lr = LeastSquares(), 0.05
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-16, weight_decay=0.0)
    weights = [problem.start]
    train_reference(
        problem.model,
        problem.loss,
        [[problem.inputs]] * 40,
        optimizer,
        micro_batches=2,
        delay=1,
        after_update=lambda: weights.append(problem.weights().copy()),
    )
    synchronous = Adam(0.9, 0.95)
    for t in range(40):
        step = lr * synchronous(problem.gradient(weights[max(t - 1, 0)]))
        np.testing.assert_allclose(weights[t] - weights[t + 1], step, rtol=1e-9, atol=1e-12)
    [state] = optimizer.state.values()
    np.testing.assert_allclose(state["exp_avg"], synchronous.m, rtol=1e-9)
    np.testing.assert_allclose(state["exp_avg_sq"], synchronous.v, rtol=1e-9)


METHODS = [Method(0.9, d, s, n) for n in (False, True) for d, s in ((0, 0.0), (1, 0.0), (1, 1.0))]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_adam_oscillates_at_its_stability_limit_whatever_the_eigenvalue(method: Method) -> None:
    predicted = 1 / stability_limit(method)
    for beta2, updates, tolerance in ((0.95, 2000, 0.08), (0.98, 4000, 0.04)):
        floors = adam_floors(method, beta2, updates=updates)  # eigenvalues 0.01 .. 1
        assert floors == pytest.approx(predicted, rel=tolerance)
        assert floors.max() < 1.02 * floors.min()


@pytest.mark.parametrize("nesterov", [False, True])
def test_noise_makes_the_price_of_the_delay_small_for_adam_too(nesterov: bool) -> None:
    floors = []
    for seed in (2, 3):
        fresh, delayed, fed = (
            adam_floor(Method(0.9, d, s, nesterov), 0.95, 0.1, seed) for d, s in ((0, 0.0), (1, 0.0), (1, 1.0))
        )
        assert max(fresh, fed) < delayed < min(1.02 * fresh, fresh + 0.1)
        floors.append(fresh)
    assert floors[1] > 1.2 * floors[0]  # seeds differ by more than methods do


def test_the_price_for_adam_comes_near_that_for_the_lmo_only_in_nesterovs_form() -> None:
    for nesterov in (False, True):
        methods = [[Method(beta, d, nesterov=nesterov) for d in (0, 1)] for beta in (0.9, 0.95)]
        adam_fresh, adam_delayed = (adam_floor(method, 0.95) for method in methods[0])
        lmo_fresh, lmo_delayed = (measured_radius(method, 0.0) for method in methods[1])
        ratio = adam_delayed / adam_fresh / (lmo_delayed / lmo_fresh)
        assert (1.2 < ratio < 1.5) if nesterov else (ratio > 9)
