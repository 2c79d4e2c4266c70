"""Section 3 of docs/research/theory.md: momentum under delay, with and without Error Feedback, on quadratics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.theory.iterations import Method, run_method
from tests.theory.problems import logistic_gradient
from tests.theory.spectra import (
    average_age,
    critical_root,
    delay_limit,
    feedback_limit,
    momentum_and_delay_limit,
    nesterov_feedback_limit,
    noise_gain,
    orbit_radius,
    rate,
    stability_limit,
    synchronous_limit,
    tuned_updates,
)

BETAS = [0.0, 0.4, 0.9, 0.95, 0.99]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_limits_without_delay_follow_the_jury_criterion(beta: float, nesterov: bool) -> None:
    method = Method(beta, nesterov=nesterov)
    assert stability_limit(method) == pytest.approx(synchronous_limit(beta, nesterov), rel=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_with_delay_one_the_limit_is_one_whatever_the_momentum(beta: float) -> None:
    assert stability_limit(Method(beta, 1)) == pytest.approx(1, rel=1e-7)
    for h, stays_bounded in ((0.8, True), (1.25, False)):
        run = run_method(Method(beta, 1), lambda w: np.asarray(w), np.ones(1), lr=h, updates=4000)
        assert (np.abs(run.weights[-300:]).max() < 1) == stays_bounded


@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_the_limit_of_a_longer_delay_falls_with_momentum_along_a_closed_curve(delay: int) -> None:
    limits = []
    for fraction in (1.0, 0.8, 0.4, 0.1, 0.01):  # of the angle of the critical root without momentum
        beta, limit = momentum_and_delay_limit(fraction * math.pi / (2 * delay + 1), delay)
        method = Method(max(beta, 0.0), delay)
        assert stability_limit(method) == pytest.approx(limit, rel=1e-6)
        limits.append(limit)
    assert limits[0] == pytest.approx(delay_limit(delay), rel=1e-9)
    assert delay == 1 or limits == sorted(limits, reverse=True)


def test_with_much_momentum_the_limit_tends_to_one_over_the_delay() -> None:
    for delay in (1, 2, 4):
        assert stability_limit(Method(0.999, delay)) == pytest.approx(1 / delay, rel=2e-3)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("strength", [0.0, 0.25, 0.5, 1.0, 1.5, 2.0])
def test_limits_with_error_feedback_follow_the_jury_criterion(beta: float, strength: float) -> None:
    assert stability_limit(Method(beta, 1, strength)) == pytest.approx(feedback_limit(beta, strength), rel=1e-7)


@pytest.mark.parametrize("strength", [0.25, 0.5, 1.0])
def test_error_feedback_raises_the_limit_only_with_enough_momentum(strength: float) -> None:
    threshold = strength / (1 + strength)  # 1/2 for the published rule
    assert stability_limit(Method(threshold + 0.02, 1, strength)) > 1
    assert stability_limit(Method(threshold - 0.02, 1, strength)) < 1


@pytest.mark.parametrize("beta", [0.3, 0.9, 0.95, 0.999])
def test_the_strength_with_the_largest_limit_tends_to_two(beta: float) -> None:
    best = 2 * beta / (2 - beta) ** 2
    limit = stability_limit(Method(beta, 1, best))
    assert limit == pytest.approx((2 - beta) ** 2 / (4 * (1 - beta)), rel=1e-6)
    assert all(stability_limit(Method(beta, 1, best + other)) < limit for other in (-0.1, 0.1))


@pytest.mark.parametrize(("other", "threshold"), [(0.0, 2 / 3), (1.0, 3 - 3 / math.sqrt(2))])
def test_strength_two_raises_the_limit_only_with_enough_momentum(other: float, threshold: float) -> None:
    for beta, raises in ((threshold - 0.005, False), (threshold + 0.005, True)):
        assert (stability_limit(Method(beta, 1, 2.0)) > stability_limit(Method(beta, 1, other))) == raises


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_in_nesterovs_form_limits_with_error_feedback_follow_the_quartic(beta: float, strength: float) -> None:
    method = Method(beta, 1, strength, nesterov=True)
    assert stability_limit(method) == pytest.approx(nesterov_feedback_limit(beta, strength), rel=1e-7)


@pytest.mark.parametrize(("strength", "threshold"), [(1.0, 0.7786), (2.0, 0.9170)])
def test_in_nesterovs_form_error_feedback_raises_the_limit_only_with_more_momentum(
    strength: float, threshold: float
) -> None:
    for beta, raises in ((threshold - 1e-3, False), (threshold + 1e-3, True)):
        plain, fed = (stability_limit(Method(beta, 1, s, nesterov=True)) for s in (0.0, strength))
        assert (fed > plain) == raises
    if strength == 1:
        factor = np.array([1, -7, 13, -1, -5, -1, 0, 1])  # of the resultant of the two conditions
        assert abs(np.roots(factor) - threshold).min() < 1e-4


def test_in_nesterovs_form_strength_two_has_a_lower_limit_than_one() -> None:
    for beta in np.linspace(0, 0.999, 30):
        assert nesterov_feedback_limit(beta, 2) < nesterov_feedback_limit(beta, 1)


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_nesterov_is_error_feedback_of_strength_beta(beta: float) -> None:
    """On any function and for any delay: n_t = m_t + beta (m_t - m_{t-1}), from the same first step."""
    start = np.linspace(-2, 2, 5)
    nesterov = run_method(Method(beta, 1, nesterov=True), logistic_gradient, start, lr=0.5, updates=200)
    fed = run_method(Method(beta, 1, strength=beta), logistic_gradient, start, lr=0.5, updates=200)
    np.testing.assert_allclose(nesterov.weights, fed.weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize(("delay", "strength"), [(0, 0.0), (1, 0.0), (1, 1.0), (2, 0.0), (2, 2.0)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_slow_modes_see_only_the_average_age_of_the_gradients(
    beta: float, delay: int, strength: float, nesterov: bool
) -> None:
    method, h = Method(beta, delay, strength, nesterov), 1e-5
    age = average_age(method)
    assert (1 - rate(method, h) - h) / h**2 == pytest.approx(age, abs=0.02 + 0.01 * age)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("delay", [1, 2])
def test_delay_changes_slow_modes_by_d_h_squared_whatever_the_momentum(delay: int, nesterov: bool) -> None:
    h = 1e-5
    for beta in (0.0, 0.5, 0.9, 0.95):
        fresh, delayed = (rate(Method(beta, d, nesterov=nesterov), h) for d in (0, delay))
        assert (fresh - delayed) / h**2 == pytest.approx(delay, rel=0.01)  # towards faster shrinking


def test_delay_takes_away_what_momentum_gains_on_ill_conditioned_problems() -> None:
    betas = [1 - 10 ** (-i / 4) for i in range(13)]
    for condition_number in (100, 1000):
        tuned = [
            tuned_updates(tuple(Method(beta, delay, nesterov=nesterov) for beta in betas), condition_number)
            for delay, nesterov in ((0, False), (1, False), (1, True))
        ]
        assert tuned[0] < math.sqrt(condition_number)
        assert tuned[1] == pytest.approx(condition_number, rel=0.03)  # no better than without momentum
        assert tuned[0] < tuned[2] < tuned[1] / 2


def test_the_best_momentum_without_delay_takes_half_the_root_of_the_condition_number() -> None:
    """beta = 0.88 for a condition number of 1000: both ends of the spectrum shrink by the root of beta per update."""
    root = math.sqrt(1000)
    beta = ((root - 1) / (root + 1)) ** 2
    assert beta == pytest.approx(0.88, abs=0.005)
    slowest = max(rate(Method(beta), (1 + side * math.sqrt(beta)) ** 2 / (1 - beta)) for side in (1, -1))
    assert -1 / math.log(slowest) == pytest.approx(root / 2, rel=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95])
def test_the_critical_oscillation_is_slow_and_momentum_makes_it_slower(beta: float) -> None:
    z = critical_root(Method(beta, 1))
    assert z.real == pytest.approx((1 + beta) / 2, abs=1e-6)
    assert orbit_radius(Method(beta, 1)) == pytest.approx(1 / math.sqrt(1 - beta), rel=1e-6)
    assert critical_root(Method(beta)).real == pytest.approx(-1, abs=1e-6)  # without delay: period two


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_gradient_noise_costs_one_plus_h_under_delay_whatever_the_momentum(beta: float) -> None:
    for h in (0.02, 0.002):
        ratio = noise_gain(Method(beta, 1), h) / noise_gain(Method(beta), h)
        assert ratio == pytest.approx(1 + h, abs=2 * h * h)
