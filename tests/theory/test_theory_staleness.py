"""Section 7 of docs/research/theory.md: the least staleness, where only a part of each gradient is an update old."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_asyncpp.reference import train_reference
from tests.theory.bounds import descent_bound, largest_step, squared_gradient_bound, tuned_momentum
from tests.theory.iterations import Array, Method, nuclear_norm, polar, run_method
from tests.theory.problems import LeastSquares, MatrixLeastSquares, StagedQuadratic, logistic_gradient
from tests.theory.spectra import (
    average_age,
    feedback_limit,
    nesterov_feedback_limit,
    noise_gain,
    noise_share,
    rate,
    stability_limit,
    synchronous_limit,
)

PHIS = [0.125, 0.25, 0.375, 0.5, 0.75, 1.0]
FORMS = [(0.0, False), (0.5, False), (0.95, False), (0.5, True), (0.95, True)]
by_phi = pytest.mark.parametrize("phi", PHIS)
by_form = pytest.mark.parametrize(("beta", "nesterov"), FORMS)


@pytest.mark.parametrize("held", [1, 2, 3])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_packages_oracle_runs_the_mixed_iteration(held: int, strength: float) -> None:
    """Four micro-batches with the same gradient, of which the first ``held`` run on the older weights."""
    problem = LeastSquares()
    parameters = list(problem.model.parameters())
    train_reference(
        problem.model,
        problem.loss,
        [[torch.cat([problem.inputs] * 4)]] * 20,
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.9),
        micro_batches=4,
        held=[(parameters, held)],
        error_feedback=strength or None,
    )
    method = Method(0.9, 1, strength * held / 4, phi=held / 4)
    np.testing.assert_allclose(problem.weights(), problem.expected(method, 0.1, 20).weights[-1], rtol=1e-12)


@by_phi
@by_form
@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0, 2.0])
def test_limits_with_mixed_staleness_follow_the_two_conditions(
    phi: float, beta: float, nesterov: bool, strength: float
) -> None:
    formula = nesterov_feedback_limit if nesterov else feedback_limit
    limit = stability_limit(Method(beta, 1, strength, nesterov, phi))
    assert limit == pytest.approx(formula(beta, strength, phi), rel=1e-7)
    if nesterov and not strength:  # statement 3.5
        assert limit == pytest.approx(feedback_limit(beta, beta, phi), rel=1e-7)


def test_beyond_its_limit_the_mixed_iteration_never_becomes_stable_again() -> None:
    for phi, strength in ((0.2, 0.0), (0.3, 0.3), (0.6, 1.5), (1.0, 2.0)):
        method = Method(0.9, 1, strength, phi=phi)
        assert all(rate(method, factor * stability_limit(method)) > 1 for factor in (1.001, 1.5, 4.0, 20.0, 500.0))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95])
def test_the_largest_limit_is_that_of_a_quarter_of_one_minus_beta(beta: float) -> None:
    turn = (1 - beta) / 4
    assert stability_limit(Method(beta, 1, phi=turn)) == pytest.approx(4 / (1 - beta), rel=1e-5)
    for phi in (turn * 0.9, turn * 1.1):
        assert stability_limit(Method(beta, 1, phi=phi)) < 4 / (1 - beta)
    for phi in (turn, 0.3, 0.45, 0.5, 1.0):  # also below one half
        assert stability_limit(Method(beta, 1, phi=phi)) == pytest.approx(1 / phi, rel=1e-5)


def test_the_limits_of_a_sum_momentum_are_smaller_by_one_minus_beta() -> None:
    """torch's SGD without dampening, m = beta m + g, on w^2 / 2 with staleness 1/2: 0.1 / phi at beta = 0.9."""
    for factor, stays_bounded in ((0.97, True), (1.03, False)):
        w = torch.ones(1, dtype=torch.float64)
        old = w.clone()
        optimizer = torch.optim.SGD([w], lr=factor * 0.1 / 0.5, momentum=0.9)
        for _ in range(3000):
            w.grad, old = 0.5 * old + 0.5 * w, w.clone()
            optimizer.step()
        assert (abs(w.item()) < 1) == stays_bounded


def test_a_little_staleness_costs_nesterovs_form_no_stability() -> None:
    sync = synchronous_limit(0.95, nesterov=True)
    for phi, keeps in ((0.1, True), (0.31, True), (0.32, False)):
        assert (stability_limit(Method(0.95, 1, nesterov=True, phi=phi)) >= sync) == keeps


@by_phi
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
def test_with_strength_phi_the_limit_has_a_closed_form(phi: float, beta: float) -> None:
    pair = (math.sqrt(1 + 4 / ((1 - beta) * phi**2)) - 1) / 2
    alternating = synchronous_limit(beta) / (1 - 4 * phi**2) if phi < 0.5 else math.inf
    assert stability_limit(Method(beta, 1, phi, phi=phi)) == pytest.approx(min(pair, alternating), rel=1e-7)


@pytest.mark.parametrize("phi", [0.5, 0.75, 1.0])
def test_strength_phi_raises_the_limit_only_with_enough_momentum(phi: float) -> None:
    threshold = phi / (1 + phi)
    for beta, raises in ((threshold - 0.02, False), (threshold + 0.02, True)):
        assert (stability_limit(Method(beta, 1, phi, phi=phi)) > stability_limit(Method(beta, 1, phi=phi))) == raises


@by_phi
@by_form
def test_with_strength_phi_slow_modes_are_synchronous_to_second_order(phi: float, beta: float, nesterov: bool) -> None:
    h = 0.01 * (1 - beta)
    fresh, stale, fed = (rate(Method(beta, 1, s, nesterov, p), h) for s, p in ((0.0, 0.0), (0.0, phi), (phi, phi)))
    assert (fresh - stale) / h**2 == pytest.approx(phi, rel=0.06)
    assert (fed - fresh) / h**3 == pytest.approx(phi**2, rel=0.1)
    for strength in (0.0, phi / 2, 1.5 * phi):
        method = Method(beta, 1, strength, nesterov, phi)
        assert (fresh - rate(method, h)) / h**2 == pytest.approx(
            average_age(method) - average_age(Method(beta, nesterov=nesterov)), rel=0.06
        )


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("phi", [0.25, 0.5, 1.0])
def test_strength_phi_is_a_second_difference_of_the_gradients(phi: float, beta: float) -> None:
    """On any function: the synchronous rule, fed with g_t - phi^2 (g_t - 2 g_{t-1} + g_{t-2})."""
    lr, start = 0.5, np.linspace(-2, 2, 5)
    fed = run_method(Method(beta, 1, phi, phi=phi), logistic_gradient, start, lr=lr, updates=60)
    gradients = [logistic_gradient(fed.weights[max(t, 0)]) for t in range(-2, 60)]
    rule, w = Method(beta).rule(), start
    for t in range(60):
        second = gradients[t + 2] - 2 * gradients[t + 1] + gradients[t]
        w = w - lr * rule(gradients[t + 2] - phi**2 * second)
        np.testing.assert_allclose(fed.weights[t + 1], w, rtol=1e-11, atol=1e-13)


def distance(method: Method, lr: float) -> float:
    """Largest distance to the synchronous trajectory over lr * updates = 3, logistic regression."""
    start, updates = np.linspace(-2, 2, 5), round(3 / lr)
    mixed, fresh = (
        run_method(m, logistic_gradient, start, lr=lr, updates=updates).weights for m in (method, Method(method.beta))
    )
    return float(np.abs(mixed - fresh).max())


@pytest.mark.parametrize("beta", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_the_distance_to_synchronous_training_falls_with_the_square_of_phi(beta: float) -> None:
    whole = distance(Method(beta, 1, 1.0), 0.005)
    for phi in (0.25, 0.5):
        fed, finer = (distance(Method(beta, 1, phi, phi=phi), lr) for lr in (0.005, 0.0025))
        assert fed == pytest.approx(phi**2 * whole, rel=0.1)
        assert math.log2(fed / finer) == pytest.approx(2, abs=0.1)
        for other in (0.0, 0.5 * phi, 1.5 * phi):
            coarse, fine = (distance(Method(beta, 1, other, phi=phi), lr) for lr in (0.005, 0.0025))
            assert math.log2(coarse / fine) == pytest.approx(1, abs=0.1)


@by_phi
@pytest.mark.parametrize(("beta", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_noise_with_mixed_staleness(phi: float, beta: float, nesterov: bool) -> None:
    h = 1e-3
    fresh = noise_gain(Method(beta, nesterov=nesterov), h)
    for s in (0.0, phi):
        expected = phi - s + 2 * s * (1 + s) * noise_share(beta, nesterov)
        ratio = noise_gain(Method(beta, 1, s, nesterov, phi), h) / fresh
        assert (ratio - 1) / h == pytest.approx(expected, abs=0.03)


@by_form
@pytest.mark.parametrize(
    ("phis", "feedback"),
    [
        ((0.75, 0.25, 0.0), False),
        ((0.3, 0.2, 0.1), True),
        ((1.0, 1.0, 0.0), False),
        ((1.0, 1.0, 0.0), True),
        pytest.param((0.75, 0.25, 0.0), True, marks=pytest.mark.slow),
        pytest.param((0.3, 0.2, 0.1), False, marks=pytest.mark.slow),
    ],
)
def test_stages_of_different_staleness_are_stable_where_each_would_be(
    beta: float, nesterov: bool, phis: tuple[float, ...], feedback: bool
) -> None:
    problem = StagedQuadratic.random(*phis)
    limits = [
        stability_limit(Method(beta, 1, phi if feedback else 0.0, nesterov, phi)) for phi in np.linspace(*phis[::2], 21)
    ]
    largest = float(np.linalg.eigvalsh(problem.h)[-1])
    method = Method(beta, nesterov=nesterov)
    assert all(problem.rate(method, f * min(limits) / largest, feedback) < 1 for f in (0.05, 0.5, 0.999))
    apart = StagedQuadratic(np.eye(6), problem.phi)  # where no stage sees another, nothing more is true
    assert apart.rate(method, 1.001 * min(limits), feedback) > 1


@pytest.mark.parametrize(("beta", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_stages_of_different_staleness_shrink_as_synchronous_training_to_second_order(
    beta: float, nesterov: bool
) -> None:
    problem, fresh, lr = StagedQuadratic.random(0.75, 0.25, 0.0), StagedQuadratic.random(0, 0, 0), 1e-3
    eigenvalues, vectors = np.linalg.eigh(problem.h)
    h, slowest, method = lr * eigenvalues[0], vectors[:, 0], Method(beta, nesterov=nesterov)
    sync = fresh.rate(method, lr, feedback=False)
    assert (sync - problem.rate(method, lr, feedback=False)) / h**2 == pytest.approx(
        slowest @ (problem.phi * slowest), rel=0.02
    )
    assert abs(problem.rate(method, lr, feedback=True) - sync) < h**3


def exponent(problem: StagedQuadratic, beta: float, base_trajectory: bool = False) -> float:
    """Of lr, in the distance of W with Error Feedback, or of Z, to synchronous training from the same start."""
    lrs, distances = [0.005, 0.0025], []
    for lr in lrs:
        run = problem.run(beta, lr, feedback=True)
        path = run.base_trajectory() + problem.phi * run.steps[0] if base_trajectory else run.weights
        fresh = run_method(Method(beta), problem.gradient, path[0], lr=lr, updates=len(path) - 1)
        distances.append(np.abs(path - fresh.weights).max())
    return math.log2(distances[0] / distances[1])


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_only_with_equal_staleness_the_weights_themselves_are_synchronous_to_second_order(beta: float) -> None:
    assert exponent(StagedQuadratic.random(0.5, 0.5, 0.5), beta) == pytest.approx(2, abs=0.2)
    different = StagedQuadratic.random(0.75, 0.25, 0.0)
    assert exponent(different, beta) == pytest.approx(1, abs=0.1)
    assert exponent(different, beta, base_trajectory=True) == pytest.approx(2, abs=0.2)


class Wells:
    """f(w) = sum of c w^2 / (1 + w^2): smooth with L = 2 max(c), not convex."""

    c = np.array([0.2, 0.5, 1.0])
    smoothness = 2.0

    def value(self, w: Array) -> Array:
        return np.asarray((self.c * w**2 / (1 + w**2)).sum(-1))

    def gradient(self, w: Array) -> Array:
        return np.asarray(2 * self.c * w / (1 + w**2) ** 2)


@pytest.mark.parametrize("phi", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_the_bound_on_squared_gradients_holds_up_to_its_largest_step(phi: float, sigma: float) -> None:
    problem, updates = Wells(), 100
    noise = sigma / math.sqrt(3) * np.random.default_rng(0).standard_normal((updates, 1000, 3))
    start = np.tile([2.0, -1.0, 1.5], (1000, 1))
    for fraction in (0.1, 1.0):
        lr = fraction * largest_step(phi) / problem.smoothness
        run = run_method(Method(0, 1, phi=phi), problem.gradient, start, lr=lr, updates=updates, noise=noise)
        average = (problem.gradient(run.weights[:-1]) ** 2).sum(-1).mean()
        bound = squared_gradient_bound(float(problem.value(start[0])), problem.smoothness, phi, lr, updates, sigma**2)
        assert 0.1 * bound < average <= bound


@pytest.mark.parametrize("phi", [0.0, 0.25, 1.0])
def test_each_update_keeps_the_descent_inequality_which_a_parabola_attains(phi: float) -> None:
    """f(W_{t+1}) <= f(W_t) - lr/2 |grad f|^2 - lr/2 (1 - L lr) |g|^2 + lr/2 phi^2 L^2 |W_t - W_{t-1}|^2."""
    lr, wells = 0.2, Wells()
    for value, gradient, attained in (
        (wells.value, wells.gradient, False),
        (lambda w: np.asarray((w**2).sum(-1)), lambda w: np.asarray(2 * w), True),
    ):
        run = run_method(Method(0, 1, phi=phi), gradient, np.array([2.0, -1.0, 1.5]), lr=lr, updates=50)
        w, g = run.weights, run.steps / lr
        moved = ((w[1:-1] - w[:-2]) ** 2).sum(-1)
        right = -((gradient(w[1:-1]) ** 2).sum(-1)) - (1 - 2 * lr) * (g[1:] ** 2).sum(-1) + 4 * phi**2 * moved
        difference = value(w[2:]) - value(w[1:-1]) - lr / 2 * right
        assert (np.abs(difference) < 1e-12).all() if attained else (difference < 1e-12).all()


@by_phi
def test_with_the_tuned_step_the_delay_is_in_the_lower_order_term(phi: float) -> None:
    gap, smoothness, sigma = 3.0, 2.0, 0.7
    for updates in (10, 1000, 10**6):
        lr = min(largest_step(phi) / smoothness, math.sqrt(2 * gap / (smoothness * updates)) / sigma)
        lower = 2 * smoothness * gap / updates
        closed = 2 * sigma * math.sqrt(lower) + lower * (phi**2 + 1 / largest_step(phi))
        assert squared_gradient_bound(gap, smoothness, phi, lr, updates, sigma**2) <= closed * (1 + 1e-12)


@by_phi
def test_with_tuned_momentum_the_delay_is_in_the_lower_order_term_for_the_lmo(phi: float) -> None:
    gap, smoothness, noise = 3.0, 2.0, 0.7
    for updates in (10**3, 10**5, 10**7):
        beta, lr = tuned_momentum(gap, smoothness, updates, noise)
        whole, fresh = (descent_bound(gap, smoothness, Method(beta, 1, phi=p), lr, updates, noise) for p in (phi, 0.0))
        product = 2 * smoothness * gap
        leading = 4 * (product * noise**2 / updates) ** 0.25
        delay = phi * product**0.75 / (math.sqrt(noise) * updates**0.75)
        assert whole - fresh == pytest.approx(delay, rel=1e-6)
        assert delay / leading == pytest.approx(phi * (1 - beta) / 4, rel=1e-6)
        assert whole <= leading + delay + 2 * noise**2 / math.sqrt(product * updates)
        for other_beta, other_lr in (
            (beta, 2 * lr),
            (beta, lr / 2),
            (1 - 4 * (1 - beta), lr),
            (1 - (1 - beta) / 4, lr),
        ):
            other = descent_bound(gap, smoothness, Method(other_beta, 1, phi=phi), other_lr, updates, noise)
            assert other > 0.85 * whole  # no other choice is much better
    quiet = math.sqrt(2 * gap / (smoothness * 100 * (1 + 4 * phi)))  # without noise and momentum
    bound = descent_bound(gap, smoothness, Method(0, 1, phi=phi), quiet, 100)
    assert bound == pytest.approx(math.sqrt(2 * smoothness * gap * (1 + 4 * phi) / 100), rel=1e-12)


@pytest.mark.parametrize("phi", [0.25, 0.5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_lmo_bound_holds_with_phi_for_the_delay(phi: float, nesterov: bool) -> None:
    """And on a straight path the gradient error is L lr (phi + the age that momentum gives)."""
    problem, method, lr = MatrixLeastSquares.random(1), Method(0.9, 1, nesterov=nesterov, phi=phi), 0.02
    run = run_method(method, problem.gradient, np.zeros((4, 4)), lr=lr, updates=400, map_momentum=polar)
    gap = float(problem.value(run.weights[0]))
    average = nuclear_norm(problem.gradient(run.weights[:-1])).mean()
    assert average <= descent_bound(gap, problem.smoothness, method, lr, 400)
    far = problem.minimiser + 20 * polar(np.random.default_rng(6).standard_normal((4, 4)))
    run = run_method(method, problem.gradient, far, lr=lr, updates=400, map_momentum=polar)
    rule = method.rule()
    for t in range(400):
        old, new = problem.gradient(run.weights[max(t - 1, 0)]), problem.gradient(run.weights[t])
        error = nuclear_norm(rule(phi * old + (1 - phi) * new) - new)
    assert error == pytest.approx(problem.smoothness * lr * average_age(method), rel=1e-9)
