"""Section 4 of docs/research/theory.md: what Error Feedback corrects, and what it costs in noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.theory.iterations import Method, polar, run_method
from tests.theory.problems import MatrixLeastSquares, distance_slope, logistic_gradient
from tests.theory.spectra import best, noise_gain, noise_share, rate, stability_limit


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("delay", [1, 2])
def test_error_feedback_is_the_base_trajectory_extrapolated_by_its_last_step(strength: float, delay: int) -> None:
    """W_{t+1} = Y_{t+1} - s u_t + s u_0, for any base rule; here the spectral LMO with momentum."""
    problem = MatrixLeastSquares.random(5)
    run = run_method(
        Method(0.9, delay, strength), problem.gradient, np.zeros((4, 4)), lr=0.05, updates=60, map_momentum=polar
    )
    y = run.base_trajectory()
    np.testing.assert_allclose(run.weights[1:], y[1:] - strength * run.steps + strength * run.steps[0], atol=1e-12)


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_strength_equal_to_the_delay_lifts_the_order_of_the_distance_to_synchronous_training(
    delay: int, beta: float
) -> None:
    assert distance_slope(delay, float(delay), beta) == pytest.approx(2, abs=0.1)
    for other in (0.0, delay - 0.5, delay + 0.5):
        assert distance_slope(delay, other, beta) == pytest.approx(1, abs=0.1)


def test_the_distance_with_error_feedback_stays_below_that_without_for_small_steps() -> None:
    start = np.linspace(-2, 2, 5)
    sync, plain, fed = (
        run_method(method, logistic_gradient, start, lr=0.05, updates=100).weights
        for method in (Method(0.9), Method(0.9, 1), Method(0.9, 1, 1.0))
    )
    assert np.abs(fed - sync).max() < 0.1 * np.abs(plain - sync).max()


def noisy_distances(beta: float, strength: float, lr: float, quiet_start: bool) -> tuple[float, float]:
    """Root mean square of W - W_sync, the same noise in both, four seeds; and of it less the noise that EF adds.

    ``quiet_start``: no noise in the first gradient, which m_0 = g_0 takes in full.
    """
    updates, start = round(3 / lr), np.linspace(-2, 2, 5)
    whole, left = 0.0, 0.0
    for seed in range(4):
        noise = 0.3 * np.random.default_rng(seed).standard_normal((updates, 5))
        noise[0] *= not quiet_start
        delayed, fresh = (
            run_method(method, logistic_gradient, start, lr=lr, updates=updates, noise=noise).weights[1:]
            for method in (Method(beta, 1, strength), Method(beta))
        )
        rule = Method(beta).rule()
        step_noise = lr * np.stack([rule(xi) for xi in noise])  # of u_t
        whole += float(((delayed - fresh) ** 2).mean()) / 4
        left += float(((delayed - fresh + strength * (step_noise - step_noise[0])) ** 2).mean()) / 4
    return math.sqrt(whole), math.sqrt(left)


def exponent(lrs: list[float], distances: Sequence[float]) -> float:
    return float(np.polyfit(np.log(lrs), np.log(distances), 1)[0])


@pytest.mark.parametrize(("beta", "farther", "farther_later"), [(0.0, 6.0, 5.0), (0.9, 3.5, 1.1)])
def test_with_gradient_noise_error_feedback_is_farther_from_synchronous_training(
    beta: float, farther: float, farther_later: float
) -> None:
    lrs = [0.04, 0.02, 0.01]
    for quiet_start, factor in ((False, farther), (True, farther_later)):
        plain, fed = ([noisy_distances(beta, s, lr, quiet_start)[0] for lr in lrs] for s in (0.0, 1.0))
        assert exponent(lrs, plain) == pytest.approx(1, abs=0.1)
        assert exponent(lrs, fed) == pytest.approx(1, abs=0.1)
        assert all(factor < f / p < 1.4 * factor for f, p in zip(fed, plain))


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_what_error_feedback_adds_to_that_distance_is_the_noise_of_its_last_step(beta: float) -> None:
    lrs = [0.04, 0.02, 0.01]
    whole, left = zip(*(noisy_distances(beta, 1.0, lr, quiet_start=True) for lr in lrs))
    assert all(rest < 0.15 * distance for rest, distance in zip(left, whole))
    assert exponent(lrs, left) > 1.15  # of higher order


def test_one_eighth_is_the_best_strength_for_one_eigenvalue() -> None:
    """A triple root at 1/3; no strength and step can do better since the three roots sum to one."""
    z = 1 / 3
    h, s = 8 / 27, 1 / 8
    assert z**3 - z**2 + h * (1 + s) * z - h * s == pytest.approx(0, abs=1e-15)
    assert rate(Method(delay=1, strength=s), h) == pytest.approx(1 / 3, abs=1e-4)  # a triple root: eps^(1/3)
    for other in (0.0, 0.05, 0.25, 0.5, 1.0):
        assert best(Method(delay=1, strength=other))[1] > 1 / 3 + 0.01


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_the_best_rate_with_strength_d_is_the_root_of_the_one_without(delay: int) -> None:
    assert best(Method(delay=delay, strength=delay))[1] == pytest.approx(math.sqrt(delay / (delay + 1)), rel=1e-4)


def simulated_variance(method: Method, h: float) -> tuple[float, float, float]:
    """Variances of W, of its base trajectory (shifted as in the page) and of u, over 2000 runs, lr = 1."""
    xi = np.random.default_rng(11).standard_normal((400, 2000))
    run = run_method(method, lambda w: np.asarray(h * w), np.zeros(2000), lr=1.0, updates=400, noise=xi)
    shifted = run.base_trajectory() + method.strength * run.steps[0]
    return float(run.weights[200:].var()), float(shifted[200:].var()), float(run.steps[200:].var())


@pytest.mark.parametrize("h", [0.1, 0.4])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_stationary_variances_are_those_of_simulations(beta: float, h: float) -> None:
    for method in (Method(beta), Method(beta, 1), Method(beta, 1, 1.0)):
        w, y, _ = simulated_variance(method, h)
        assert noise_gain(method, h) == pytest.approx(w, rel=0.03)
        assert noise_gain(method, h, base_trajectory=True) == pytest.approx(y, rel=0.03)


@pytest.mark.parametrize("h", [0.01, 0.1, 0.3, 0.5])
def test_variances_without_momentum_follow_the_closed_forms(h: float) -> None:
    assert noise_gain(Method(), h) == pytest.approx(1 / (h * (2 - h)), rel=1e-6)
    assert noise_gain(Method(delay=1), h) == pytest.approx((1 + h) / (h * (1 - h) * (2 + h)), rel=1e-6)
    fed, denominator = Method(delay=1, strength=1.0), h * (2 + 3 * h) * (1 - h - h * h)
    assert noise_gain(fed, h) == pytest.approx((1 + 5 * h + 3 * h * h) / denominator, rel=1e-6)
    assert noise_gain(fed, h, base_trajectory=True) == pytest.approx((1 + h - h * h) / denominator, rel=1e-6)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_variance_that_error_feedback_adds_is_that_of_the_step(strength: float, nesterov: bool) -> None:
    """Var W = Var Y + s (1 + s) Var u, exactly, in the stationary state."""
    for beta in (0.0, 0.9):
        w, y, u = simulated_variance(Method(beta, 1, strength, nesterov), 0.3)
        assert w == pytest.approx(y + strength * (1 + strength) * u, rel=2e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_shrinks_the_noise_of_error_feedback(beta: float, strength: float, nesterov: bool) -> None:
    expected = 1 - strength + 2 * strength * (1 + strength) * noise_share(beta, nesterov)
    h = 1e-3
    ratio = noise_gain(Method(beta, 1, strength, nesterov), h) / noise_gain(Method(beta, nesterov=nesterov), h)
    assert (ratio - 1) / h == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(("nesterov", "threshold"), [(False, 0.6), (True, 0.74)])
def test_error_feedback_lowers_the_noise_only_with_enough_momentum(nesterov: bool, threshold: float) -> None:
    for beta, lowers in ((threshold - 0.01, False), (threshold + 0.01, True)):
        plain, fed = (noise_gain(Method(beta, 1, strength, nesterov), 1e-3) for strength in (0.0, 1.0))
        assert (fed < plain) == lowers


def test_near_the_limit_the_noise_grows_without_bound() -> None:
    method = Method(delay=1, strength=1.0)
    limit = stability_limit(method)
    gains = [noise_gain(method, factor * limit) / noise_gain(Method(), factor * limit) for factor in (0.5, 0.9, 0.99)]
    assert gains[0] < 4 < 10 < gains[1] < 100 < gains[2]
