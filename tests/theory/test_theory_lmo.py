"""Section 5 of docs/theory.md: LMO methods (Muon with exact orthogonalisation, sign descent) under delay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.theory.iterations import Array, Method, Run, nuclear_norm, polar, run_method, sign
from tests.theory.problems import MatrixLeastSquares, measured_radius
from tests.theory.spectra import critical_root, orbit_radius, stability_limit

SHAPE, LR, UPDATES = (4, 6), 0.02, 400


def spectral_run(problem: MatrixLeastSquares, method: Method, noise: Array | None = None) -> Run:
    return run_method(
        method, problem.gradient, np.zeros(SHAPE), lr=LR, updates=UPDATES, map_momentum=polar, noise=noise
    )


def test_the_smoothness_constant_is_the_trace_and_cannot_be_smaller() -> None:
    problem, generator = MatrixLeastSquares.random(0, *SHAPE), np.random.default_rng(1)
    zero = problem.gradient(np.zeros(SHAPE))
    for _ in range(200):
        x = generator.standard_normal(SHAPE)
        ratio = nuclear_norm(problem.gradient(x) - zero) / np.linalg.norm(x, 2)
        assert ratio <= problem.smoothness * (1 + 1e-12)
    tight = nuclear_norm(problem.gradient(np.eye(*SHAPE)) - zero)
    assert tight == pytest.approx(problem.smoothness, rel=1e-12)


@pytest.mark.parametrize("lmo", [polar, sign])
def test_the_lmo_attains_the_dual_norm_with_a_step_of_norm_one(lmo: object) -> None:
    m = np.random.default_rng(2).standard_normal(SHAPE)
    d = polar(m) if lmo is polar else sign(m)
    norm, dual = (np.linalg.norm(d, 2), nuclear_norm(m)) if lmo is polar else (np.abs(d).max(), np.abs(m).sum())
    assert norm == pytest.approx(1, rel=1e-12)
    assert (m * d).sum() == pytest.approx(float(dual), rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_error_and_the_descent_bound_hold_without_noise(beta: float, delay: int, seed: int) -> None:
    problem = MatrixLeastSquares.random(seed, *SHAPE)
    run = spectral_run(problem, Method(beta, delay))
    average = nuclear_norm(problem.gradient(run.weights[:-1])).mean()
    gap, smoothness = problem.value(run.weights[0]), problem.smoothness
    bound = gap / (LR * UPDATES) + smoothness * LR * (0.5 + 2 * beta / (1 - beta) + 2 * delay)
    assert average <= bound
    rule, gradients = Method(beta).rule(), problem.gradient(run.weights)
    for t in range(UPDATES):
        momentum = rule(gradients[max(t - delay, 0)])
        error = nuclear_norm(momentum - gradients[t])
        assert error <= smoothness * LR * (beta / (1 - beta) + delay) * (1 + 1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.95])
@pytest.mark.parametrize("delay", [0, 1])
def test_the_descent_bound_holds_with_noise(beta: float, delay: int) -> None:
    problem, sigma = MatrixLeastSquares.random(0, *SHAPE), 0.1
    averages = []
    for seed in range(4):
        noise = np.random.default_rng(seed).standard_normal((UPDATES, *SHAPE)) * sigma / np.sqrt(np.prod(SHAPE))
        run = spectral_run(problem, Method(beta, delay), noise)
        averages.append(nuclear_norm(problem.gradient(run.weights[:-1])).mean())
    gap, smoothness, rank = problem.value(np.zeros(SHAPE)), problem.smoothness, min(SHAPE)
    bound = gap / (LR * UPDATES) + smoothness * LR * (0.5 + 2 * beta / (1 - beta) + 2 * delay)
    bound += 2 * np.sqrt(rank) * sigma * (np.sqrt((1 - beta) / (1 + beta)) + 1 / (UPDATES * (1 - beta)))
    assert np.mean(averages) <= bound


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_the_descent_bound_holds_for_sign_descent(delay: int) -> None:
    a = np.random.default_rng(4).standard_normal((6, 6))
    h = a @ a.T / 6
    smoothness = max(np.abs(h @ np.array(x)).sum() for x in itertools.product((-1.0, 1.0), repeat=6))
    start, beta = np.linspace(-2, 2, 6), 0.9
    run = run_method(Method(beta, delay), lambda w: np.asarray(h @ w), start, lr=LR, updates=UPDATES, map_momentum=sign)
    average = np.abs(run.weights[:-1] @ h).sum(1).mean()
    gap = 0.5 * start @ h @ start
    assert average <= gap / (LR * UPDATES) + smoothness * LR * (0.5 + 2 * beta / (1 - beta) + 2 * delay)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_bound_with_error_feedback_holds_with_the_measured_change_of_steps(beta: float, seed: int) -> None:
    problem = MatrixLeastSquares.random(seed, *SHAPE)
    run = spectral_run(problem, Method(beta, 1, 1.0))
    shifted = run.base_trajectory()[1:] + run.steps[0]  # Z_1 = W_0 .. Z_T
    np.testing.assert_allclose(shifted[0], run.weights[0], atol=1e-14)
    left = np.diff(run.steps, axis=0)  # what is left of the staleness: u_{t-1} - u_{t-2}, t = 2 .. T
    np.testing.assert_allclose(run.weights[1:-1] - shifted[1:], left, atol=1e-12)
    average = nuclear_norm(problem.gradient(shifted[:-1])).mean()
    count, gap = UPDATES - 1, problem.value(run.weights[0])
    change = np.linalg.norm(left[:-1], 2, axis=(1, 2)).sum() / (LR * count)
    bound = gap / (LR * count) + problem.smoothness * LR * (0.5 + 2 * beta / (1 - beta) + 2 * change)
    assert average <= bound
    assert 0 < change <= 2
    assert np.linalg.norm(run.weights[1:] - shifted, 2, axis=(1, 2)).max() <= LR * (1 + 1e-9)


def test_steps_with_error_feedback_can_be_three_times_as_long_and_no_longer() -> None:
    problem = MatrixLeastSquares.random(0, *SHAPE)
    longest = 0.0
    for seed in range(3):
        noise = np.random.default_rng(seed).standard_normal((UPDATES, *SHAPE))
        run = spectral_run(problem, Method(0, 1, 1.0), noise)
        longest = max(longest, float(np.linalg.norm(np.diff(run.weights, axis=0), 2, axis=(1, 2)).max()))
    assert 2.5 * LR < longest <= 3 * LR * (1 + 1e-9)


FIVE = [
    Method(0.9, 1),
    Method(0.9, 2),
    Method(0.9, 1, 1.0),
    Method(0.9, 1, nesterov=True),
    Method(0.9, 1, 1.0, nesterov=True),
]


@pytest.mark.parametrize("method", FIVE, ids=str)
def test_the_rotating_orbit_solves_the_lmo_iteration_exactly(method: Method) -> None:
    """W_t = W* + r O exp(theta t J), J a complex structure: each update is -lr times the corrected LMO step."""
    problem = MatrixLeastSquares.random(3)
    radius, history = LR * orbit_radius(method), 500
    j = np.kron(np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]]))
    angle = float(np.angle(critical_root(method)))
    start = np.linalg.qr(np.random.default_rng(5).standard_normal((4, 4)))[0]
    orbit = [radius * start @ (np.cos(angle * t) * np.eye(4) + np.sin(angle * t) * j) for t in range(history)]
    rule, steps = method.rule(polar), []
    for t in range(method.delay, history):  # the orbit's own gradients through the rule, until momentum has settled
        steps.append(LR * rule(problem.gradient(problem.minimiser + orbit[t - method.delay])))
    corrected = steps[-2] + method.strength * (steps[-2] - steps[-3])
    np.testing.assert_allclose(orbit[-1] - orbit[-2], -corrected, atol=1e-6 * LR)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_without_noise_runs_settle_at_the_radius_of_the_orbit(beta: float) -> None:
    for method in (Method(beta, 1), Method(beta, 1, 1.0), Method(beta, 1, nesterov=True)):
        for lr in (0.02, 0.01):  # in units of lr: the radius itself is proportional to it
            assert measured_radius(method, 0.0, lr=lr) == pytest.approx(orbit_radius(method), rel=0.06)


def test_noise_makes_the_price_of_the_delay_small() -> None:
    prices = []
    for noise in (0.0, 0.03, 0.3):
        fresh, delayed, fed = (measured_radius(Method(0.95, d, s), noise) for d, s in ((0, 0.0), (1, 0.0), (1, 1.0)))
        assert 0.5 < (delayed - fed) / (delayed - fresh) < 0.95
        prices.append(delayed / fresh - 1)
    finer, finer_delayed = (0.01 * measured_radius(Method(0.95, d), 0.03, lr=0.01) for d in (0, 1))
    coarser, coarser_delayed = (0.02 * measured_radius(Method(0.95, d), 0.03) for d in (0, 1))
    assert 0 < finer_delayed - finer < 0.6 * (coarser_delayed - coarser)  # at least in proportion to lr
    assert prices[0] > 2 > 0.6 > prices[1] > 0.2 > 0.06 > prices[2]


def test_without_momentum_error_feedback_enlarges_the_radius() -> None:
    for noise in (0.03, 0.3):
        assert measured_radius(Method(0, 1, 1.0), noise) > measured_radius(Method(0, 1), noise)
    assert stability_limit(Method(0, 1, 1.0)) < stability_limit(Method(0, 1))
