"""The statements of research/notes/theory.md, checked numerically: a test is named after the statement it checks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.optim import ErrorFeedback
from lightning_asyncpp.reference import train_reference
from research.theory import spectra
from research.theory.bounds import ERROR, descent_bound, largest_step, squared_gradient_bound, tuned_momentum
from research.theory.iterations import Adam, Array, Method, nuclear_norm, polar, run_method, sign
from research.theory.problems import MatrixLeastSquares, StagedQuadratic, distance_slope, logistic_gradient
from research.theory.spectra import average_age, critical_root, noise_gain, noise_share, rate, stability_limit

BETAS = [0.0, 0.5, 0.9, 0.95]
PHIS = [0.125, 0.375, 0.5, 1.0]
START = np.linspace(-2, 2, 5)
close = pytest.approx
by_beta = pytest.mark.parametrize("beta", BETAS)
by_form = pytest.mark.parametrize("nesterov", [False, True])
by_phi = pytest.mark.parametrize("phi", PHIS)


class LeastSquares:
    """Linear regression as a module, a loss and a plain gradient."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        self.solution = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(torch.rand(2, 3, generator=generator, dtype=torch.float64))
        self.model = nn.Sequential(nn.Linear(3, 2, bias=False))
        self.model[0].weight = self.weight
        self.start = self.weight.detach().numpy().copy()

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(inputs)
        return (output - inputs @ self.solution.T).square().mean()

    def gradient(self, w: Array) -> Array:
        x = self.inputs.numpy()
        return np.asarray((w - self.solution.numpy()) @ (x.T @ x) / 8)


@pytest.mark.parametrize("num_stale", [None, 1, 3])
@pytest.mark.parametrize("method", [Method(), Method(0.9, 1), Method(0, 1, 1.0), Method(0.9, 1, 0.5)], ids=str)
def test_1_1_the_reference_runs_the_iteration(method: Method, num_stale: int | None) -> None:
    if num_stale and not method.delay:
        pytest.skip("nothing is stale without a delay")
    problem, delay = LeastSquares(), method.delay
    optimizer = torch.optim.SGD([problem.weight], lr=0.1, momentum=method.beta, dampening=method.beta)
    batches, strength = [[torch.cat([problem.inputs] * 4)]] * 20, method.strength
    more = {"stale_counts": [([problem.weight], num_stale)]} if num_stale else {"delay": delay}
    train_reference(
        problem.model, problem.loss, batches, optimizer, microbatches=4, error_feedback=strength or None, **more
    )
    # With stale microbatches Error Feedback has the strength times their share.
    phi = num_stale / 4 if num_stale else 1.0
    expected = Method(method.beta, delay, strength * phi, phi=phi)
    run = run_method(expected, problem.gradient, problem.start, lr=0.1, updates=20)
    np.testing.assert_allclose(problem.weight.detach(), run.weights[-1], rtol=1e-12)


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_1_1_error_feedback_takes_its_steps(strength: float) -> None:
    problem = LeastSquares()
    optimizer = ErrorFeedback(
        [problem.weight], lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9), strength=strength
    )
    run = run_method(Method(0.9, 1, strength), problem.gradient, problem.start, lr=0.1, updates=20)
    for t in range(20):
        problem.weight.grad = torch.from_numpy(problem.gradient(run.weights[max(t - 1, 0)]))
        optimizer.step()
        np.testing.assert_allclose(problem.weight.detach(), run.weights[t + 1], rtol=1e-12)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_1_2_weights_are_as_old_as_a_stage_runs_ahead(microbatches: int) -> None:
    for stage in range(5):
        schedule, backwards, newest = Schedule(stage, 5), 0, []
        for action in schedule.run(12, microbatches):
            backwards += action.kind is Kind.BACKWARD
            if action.kind is Kind.FORWARD and action.index % microbatches == 0:
                newest.append(backwards // microbatches)
        assert newest == [max(t - math.ceil((4 - stage) / microbatches), 0) for t in range(12)]


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_2_1_and_2_2_limit_and_rate_of_gradient_descent(delay: int) -> None:
    limit, (h, factor) = spectra.delay_limit(delay), spectra.best(Method(delay=delay))
    assert stability_limit(Method(delay=delay)) == close(limit, rel=1e-9)
    for share, stays_bounded in ((0.97, True), (1.03, False)):
        run = run_method(Method(delay=delay), np.asarray, np.ones(1), lr=share * limit, updates=3000)
        assert (np.abs(run.weights[-20:]).max() < 1) == stays_bounded
    assert h == close(delay**delay / (delay + 1) ** (delay + 1), rel=1e-4)
    assert factor == close(delay / (delay + 1), rel=1e-3)
    for h in (0.05, 0.2, 0.6, 0.9):
        expected = (1 + math.sqrt(1 - 4 * h)) / 2 if h < 0.25 else math.sqrt(h)
        assert rate(Method(delay=1), h) == close(expected, rel=1e-12)


@by_beta
@by_form
def test_3_1_limits_without_delay(beta: float, nesterov: bool) -> None:
    assert stability_limit(Method(beta, nesterov=nesterov)) == close(
        spectra.synchronous_limit(beta, nesterov), rel=1e-7
    )


@by_beta
def test_3_2_delay_one_has_the_limit_one_and_a_slow_critical_oscillation(beta: float) -> None:
    assert stability_limit(Method(beta, 1)) == close(1, rel=1e-7)
    assert critical_root(Method(beta, 1)).real == close((1 + beta) / 2, abs=1e-6)
    assert critical_root(Method(beta)).real == close(-1, abs=1e-6)  # without delay: period two


@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_3_2_longer_delays_follow_a_closed_curve(delay: int) -> None:
    limits = []
    for fraction in (1.0, 0.8, 0.4, 0.1, 0.01):  # of the angle of the critical root without momentum
        beta, limit = spectra.momentum_and_delay_limit(fraction * math.pi / (2 * delay + 1), delay)
        assert stability_limit(Method(max(beta, 0.0), delay)) == close(limit, rel=1e-6)
        limits.append(limit)
    assert delay == 1 or limits == sorted(limits, reverse=True)
    assert stability_limit(Method(0.999, delay)) == close(1 / delay, rel=4e-3)


def test_3_3_momentum_from_which_error_feedback_raises_the_limit() -> None:
    for strength in (0.25, 0.5, 1.0):
        for side in (0.02, -0.02):
            assert (stability_limit(Method(strength / (1 + strength) + side, 1, strength)) > 1) == (side > 0)
    for beta in (0.3, 0.9, 0.999):
        strongest = 2 * beta / (2 - beta) ** 2
        assert stability_limit(Method(beta, 1, strongest)) == close((2 - beta) ** 2 / (4 * (1 - beta)), rel=1e-6)
    nesterov = {1.0: 0.7786, 2.0: 0.9170}
    assert abs(np.roots([1, -7, 13, -1, -5, -1, 0, 1]) - nesterov[1.0]).min() < 1e-4
    cases = [(False, 2.0, 0.0, 2 / 3), (False, 2.0, 1.0, 3 - 3 / math.sqrt(2))]
    for form, strength, other, threshold in [*cases, *((True, s, 0.0, beta) for s, beta in nesterov.items())]:
        for side in (0.005, -0.005):
            more, less = (stability_limit(Method(threshold + side, 1, s, form)) for s in (strength, other))
            assert (more > less) == (side > 0)
    assert all(
        spectra.nesterov_feedback_limit(b, 2) < spectra.nesterov_feedback_limit(b, 1) for b in np.linspace(0, 0.999, 30)
    )


@by_beta
@by_form
@pytest.mark.parametrize(("delay", "strength"), [(0, 0.0), (1, 0.0), (1, 1.0), (2, 2.0)])
def test_3_4_slow_modes_see_the_average_age(beta: float, delay: int, strength: float, nesterov: bool) -> None:
    method, h = Method(beta, delay, strength, nesterov), 1e-5
    assert (1 - rate(method, h) - h) / h**2 == close(average_age(method), abs=0.02 + 0.01 * average_age(method))


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_3_5_nesterov_is_error_feedback_of_strength_beta(beta: float) -> None:
    nesterov, fed = (
        run_method(method, logistic_gradient, START, lr=0.5, updates=200).weights
        for method in (Method(beta, 1, nesterov=True), Method(beta, 1, strength=beta))
    )
    np.testing.assert_allclose(nesterov, fed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strength", [0.5, 2.0])
def test_4_1_error_feedback_extrapolates_the_base_trajectory(strength: float) -> None:
    problem, method = MatrixLeastSquares.random(5), Method(0.9, 2, strength)
    run = run_method(method, problem.gradient, np.zeros((4, 4)), lr=0.05, updates=60, map_momentum=polar)
    y = run.base_trajectory()
    np.testing.assert_allclose(run.weights[1:], y[1:] - strength * run.steps + strength * run.steps[0], atol=1e-12)


def test_4_3_best_strengths_for_one_eigenvalue() -> None:
    assert np.poly([1 / 3] * 3) == close([1, -1, 8 / 27 * 9 / 8, -8 / 27 / 8])
    for strength in (0.0, 0.05, 0.25, 0.5, 1.0):
        assert spectra.best(Method(delay=1, strength=strength))[1] > 1 / 3 + 0.01
    for delay in (1, 2, 3):
        assert spectra.best(Method(delay=delay, strength=delay))[1] == close(math.sqrt(delay / (delay + 1)), rel=1e-4)


@pytest.mark.parametrize("h", [0.01, 0.1, 0.5])
def test_4_4_variances_follow_the_closed_forms(h: float) -> None:
    fed, denominator = Method(delay=1, strength=1.0), h * (2 + 3 * h) * (1 - h - h * h)
    assert noise_gain(Method(), h) == close(1 / (h * (2 - h)), rel=1e-6)
    assert noise_gain(Method(delay=1), h) == close((1 + h) / (h * (1 - h) * (2 + h)), rel=1e-6)
    assert noise_gain(fed, h) == close((1 + 5 * h + 3 * h * h) / denominator, rel=1e-6)
    assert noise_gain(fed, h, base_trajectory=True) == close((1 + h - h * h) / denominator, rel=1e-6)


@by_form
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_4_5_error_feedback_adds_the_variance_of_the_step(beta: float, nesterov: bool) -> None:
    noise = np.random.default_rng(11).standard_normal((400, 2000))
    run = run_method(
        Method(beta, 1, 1.0, nesterov), lambda w: 0.3 * w, np.zeros(2000), lr=1.0, updates=400, noise=noise
    )
    w, z, u = (some[200:].var() for some in (run.weights, run.base_trajectory() + run.steps[0], run.steps))
    assert w == close(z + 2 * u, rel=2e-3)
    assert w == close(noise_gain(Method(beta, 1, 1.0, nesterov), 0.3), rel=0.03)


def test_4_5_momentum_from_which_error_feedback_lowers_the_noise() -> None:
    for nesterov, threshold in ((False, 0.6), (True, 0.74)):
        for side in (0.01, -0.01):
            plain, fed = (noise_gain(Method(threshold + side, 1, s, nesterov), 1e-3) for s in (0.0, 1.0))
            assert (fed < plain) == (side > 0)


SHAPE, LR = (4, 6), 0.02


@pytest.mark.parametrize("lmo", [polar, sign])
def test_5_1_steps_have_norm_one_and_the_smoothness_is_the_trace(lmo: object) -> None:
    m, problem = np.random.default_rng(2).standard_normal(SHAPE), MatrixLeastSquares.random(0, *SHAPE)
    d = polar(m) if lmo is polar else sign(m)
    norm, dual = (np.linalg.norm(d, 2), nuclear_norm(m)) if lmo is polar else (np.abs(d).max(), np.abs(m).sum())
    assert (norm, (m * d).sum()) == (close(1, rel=1e-12), close(float(dual), rel=1e-12))
    assert nuclear_norm(problem.h @ np.eye(*SHAPE)) == close(problem.smoothness, rel=1e-12)
    assert nuclear_norm(problem.h @ m) <= problem.smoothness * np.linalg.norm(m, 2)


@by_form
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize(("delay", "phi"), [(0, 1.0), (1, 1.0), (3, 1.0), (1, 0.25)])
def test_5_2_the_bound_holds_and_its_gradient_error_is_attained(
    beta: float, delay: int, phi: float, nesterov: bool
) -> None:
    problem, method = MatrixLeastSquares.random(0, *SHAPE), Method(beta, delay, nesterov=nesterov, phi=phi)
    far = problem.minimiser + 20 * polar(np.random.default_rng(6).standard_normal(SHAPE))  # a straight path
    for start, is_straight in ((np.zeros(SHAPE), False), (far, True)):
        run = run_method(method, problem.gradient, start, lr=LR, updates=400, map_momentum=polar)
        rule, gradients = method.rule(), problem.gradient(run.weights)
        errors = [
            nuclear_norm(rule(phi * gradients[max(t - delay, 0)] + (1 - phi) * gradients[t]) - gradients[t])
            for t in range(400)
        ]
        largest = problem.smoothness * LR * average_age(method)
        assert max(errors) <= largest * (1 + 1e-9) + 1e-12
        assert not is_straight or errors[-1] == close(largest, rel=1e-9, abs=1e-12)
        gap = float(problem.value(run.weights[0]))
        assert nuclear_norm(gradients[:-1]).mean() <= descent_bound(gap, problem.smoothness, method, LR, 400)


@by_form
@by_beta
def test_5_2_weights_of_past_gradients_have_that_age_and_those_squares(beta: float, nesterov: bool) -> None:
    rule = Method(beta, nesterov=nesterov).rule()
    for t, unit in enumerate(np.eye(400)):  # gradient k is the k-th unit vector
        weights = rule(unit)[: t + 1]
    age = average_age(Method(beta, nesterov=nesterov))
    assert weights @ np.arange(399, -1, -1) == close(age, rel=1e-5)
    assert weights @ weights == close(noise_share(beta, nesterov), rel=1e-5)


@by_form
@by_beta
def test_5_3_the_bound_with_error_feedback_holds_with_the_change_of_steps(beta: float, nesterov: bool) -> None:
    problem, method = MatrixLeastSquares.random(1, *SHAPE), Method(beta, 1, 1.0, nesterov)
    run = run_method(method, problem.gradient, np.zeros(SHAPE), lr=LR, updates=400, map_momentum=polar)
    z, w = (run.base_trajectory()[1:] + run.steps[0])[:-1], run.weights[:-2]  # z from Z_1 = W_0 on
    change = np.diff(run.steps, axis=0)[:-1]
    np.testing.assert_allclose(w[1:], z[1:] + change, atol=1e-12)
    delta = np.linalg.norm(change, 2, axis=(1, 2)).sum() / (LR * len(z))
    fresh = descent_bound(float(problem.value(w[0])), problem.smoothness, Method(beta, nesterov=nesterov), LR, len(z))
    at_z, at_w = (nuclear_norm(problem.gradient(points)).mean() for points in (z, w))
    assert at_z <= fresh + problem.smoothness * LR * ERROR * delta
    assert at_w <= at_z + problem.smoothness * LR * delta
    assert np.linalg.norm(np.diff(run.weights, axis=0), 2, axis=(1, 2)).max() <= 3 * LR * (1 + 1e-9)


@pytest.mark.parametrize("method", [Method(0.9, 2), Method(0.9, 1, 1.0), Method(0.9, 1, 1.0, nesterov=True)], ids=str)
def test_5_4_the_rotating_orbit_solves_the_iteration(method: Method) -> None:
    problem, angle = MatrixLeastSquares.random(3), float(np.angle(critical_root(method)))
    j = np.kron(np.eye(2), [[0.0, -1.0], [1.0, 0.0]])
    start = LR * spectra.orbit_radius(method) * np.linalg.qr(np.random.default_rng(5).standard_normal((4, 4)))[0]
    orbit = [start @ (np.cos(angle * t) * np.eye(4) + np.sin(angle * t) * j) for t in range(500)]
    rule = method.rule(polar)
    steps = [LR * rule(problem.h @ w) for w in orbit[: 500 - method.delay]]
    corrected = steps[-2] + method.strength * (steps[-2] - steps[-3])
    np.testing.assert_allclose(orbit[-1] - orbit[-2], -corrected, atol=1e-6 * LR)


def test_6_2_a_stale_gradient_meets_no_staler_second_moment() -> None:
    problem, weights = LeastSquares(), []
    optimizer = torch.optim.AdamW([problem.weight], lr=0.05, betas=(0.9, 0.95), eps=1e-16, weight_decay=0.0)
    record = lambda: weights.append(problem.weight.detach().numpy().copy())  # noqa: E731
    record()
    batches = [[problem.inputs]] * 40
    train_reference(problem.model, problem.loss, batches, optimizer, microbatches=2, delay=1, after_update=record)
    synchronous = Adam(0.9, 0.95)
    for t in range(40):
        step = 0.05 * synchronous(problem.gradient(weights[max(t - 1, 0)]))
        np.testing.assert_allclose(weights[t] - weights[t + 1], step, rtol=1e-9, atol=1e-12)


@by_phi
@by_form
@by_beta
@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
def test_3_3_and_7_1_limits_with_mixed_staleness(phi: float, beta: float, nesterov: bool, strength: float) -> None:
    formula = spectra.nesterov_feedback_limit if nesterov else spectra.feedback_limit
    assert stability_limit(Method(beta, 1, strength, nesterov, phi)) == close(formula(beta, strength, phi), rel=1e-7)


@by_beta
def test_7_1_a_quarter_of_one_minus_beta_has_the_largest_limit(beta: float) -> None:
    turn = (1 - beta) / 4
    for phi in (turn, 0.3, 0.5, 1.0):
        assert stability_limit(Method(beta, 1, phi=phi)) == close(1 / phi, rel=1e-5)
    assert stability_limit(Method(beta, 1, phi=0.9 * turn)) < 4 / (1 - beta)
    sync = spectra.synchronous_limit(0.95, nesterov=True)
    assert [stability_limit(Method(0.95, 1, nesterov=True, phi=p)) >= sync for p in (0.31, 0.32)] == [True, False]


@by_phi
@by_beta
def test_7_2_with_strength_phi_the_limit_has_a_closed_form(phi: float, beta: float) -> None:
    pair = (math.sqrt(1 + 4 / ((1 - beta) * phi**2)) - 1) / 2
    alternating = spectra.synchronous_limit(beta) / (1 - 4 * phi**2) if phi < 0.5 else math.inf
    assert stability_limit(Method(beta, 1, phi, phi=phi)) == close(min(pair, alternating), rel=1e-7)


@by_phi
@by_beta
@by_form
def test_7_3_with_strength_phi_slow_modes_are_synchronous(phi: float, beta: float, nesterov: bool) -> None:
    h = 0.01 * (1 - beta)
    fresh, stale, fed = (rate(Method(beta, 1, s, nesterov, p), h) for s, p in ((0.0, 0.0), (0.0, phi), (phi, phi)))
    assert (fresh - stale) / h**2 == close(phi, rel=0.06)
    assert (fed - fresh) / h**3 == close(phi**2, rel=0.1)
    gains = [noise_gain(Method(beta, 1, s, nesterov, p), 1e-3) for s, p in ((0.0, 0.0), (phi, phi))]
    assert (gains[1] / gains[0] - 1) / 1e-3 == close(2 * phi * (1 + phi) * noise_share(beta, nesterov), abs=0.03)


@by_phi
@by_beta
def test_7_3_strength_phi_is_a_second_difference_of_the_gradients(phi: float, beta: float) -> None:
    fed = run_method(Method(beta, 1, phi, phi=phi), logistic_gradient, START, lr=0.5, updates=60)
    gradients = [logistic_gradient(fed.weights[max(t, 0)]) for t in range(-2, 60)]
    rule, w = Method(beta).rule(), START
    for t in range(60):
        second = gradients[t + 2] - 2 * gradients[t + 1] + gradients[t]
        w = w - 0.5 * rule(gradients[t + 2] - phi**2 * second)
        np.testing.assert_allclose(fed.weights[t + 1], w, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_4_2_and_7_3_the_distance_to_synchronous_training_is_of_second_order(beta: float) -> None:
    assert distance_slope(2, 2.0, beta) == close(2, abs=0.1)
    assert distance_slope(2, 1.5, beta) == close(1, abs=0.1)
    distances = []
    for phi in (1.0, 0.5):
        mixed, fresh = (
            run_method(m, logistic_gradient, START, lr=0.005, updates=600).weights
            for m in (Method(beta, 1, phi, phi=phi), Method(beta))
        )
        distances.append(np.abs(mixed - fresh).max())
    assert distances[1] == close(0.25 * distances[0], rel=0.1)


@by_form
@pytest.mark.parametrize("feedback", [False, True])
def test_7_4_stages_that_differ_are_stable_where_each_would_be(nesterov: bool, feedback: bool) -> None:
    problem, method = StagedQuadratic.random(0.75, 0.25, 0.0), Method(0.9, nesterov=nesterov)
    limit = min(
        stability_limit(Method(0.9, 1, phi if feedback else 0.0, nesterov, phi)) for phi in np.linspace(0, 0.75, 16)
    )
    largest = float(np.linalg.eigvalsh(problem.h)[-1])
    assert all(problem.rate(method, share * limit / largest, feedback) < 1 for share in (0.05, 0.5, 0.999))
    assert StagedQuadratic(np.eye(6), problem.phi).rate(method, 1.001 * limit, feedback) > 1  # nothing stronger holds


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_7_4_rates_and_distances_of_stages_that_differ(beta: float) -> None:
    problem, lr, method = StagedQuadratic.random(0.75, 0.25, 0.0), 1e-3, Method(beta)
    eigenvalues, vectors = np.linalg.eigh(problem.h)
    h, slowest = lr * eigenvalues[0], vectors[:, 0]
    sync = StagedQuadratic.random(0, 0, 0).rate(method, lr, feedback=False)
    lost = (sync - problem.rate(method, lr, feedback=False)) / h**2
    assert lost == close(slowest @ (problem.phi * slowest), rel=0.02)
    assert abs(problem.rate(method, lr, feedback=True) - sync) < h**3
    for phis, shifted, order in (((0.5,) * 3, False, 2), ((0.75, 0.25, 0), False, 1), ((0.75, 0.25, 0), True, 2)):
        staged, distances = StagedQuadratic.random(*phis), []
        for step in (0.005, 0.0025):
            run = staged.run(beta, step, feedback=True)
            path = run.base_trajectory() + staged.phi * run.steps[0] if shifted else run.weights
            fresh = run_method(method, staged.gradient, path[0], lr=step, updates=len(path) - 1)
            distances.append(np.abs(path - fresh.weights).max())
        assert math.log2(distances[0] / distances[1]) == close(order, abs=0.2)


@by_phi
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_7_5_the_bound_on_squared_gradients_holds(phi: float, sigma: float) -> None:
    c = np.array([0.2, 0.5, 1.0])  # f(w) = sum of c w^2 / (1 + w^2): smooth with L = 2, not convex
    start = np.tile([2.0, -1.0, 1.5], (1000, 1))
    gap = float((c * start[0] ** 2 / (1 + start[0] ** 2)).sum())
    noise = sigma / math.sqrt(3) * np.random.default_rng(0).standard_normal((100, 1000, 3))
    lr = largest_step(phi) / 2
    gradient = lambda w: 2 * c * w / (1 + w**2) ** 2  # noqa: E731
    run = run_method(Method(0, 1, phi=phi), gradient, start, lr=lr, updates=100, noise=noise)
    bound = squared_gradient_bound(gap, 2.0, phi, lr, 100, sigma**2)
    assert 0.1 * bound < (gradient(run.weights[:-1]) ** 2).sum(-1).mean() <= bound


@by_phi
def test_7_5_with_tuned_steps_the_delay_is_in_the_lower_order_term(phi: float) -> None:
    gap, smoothness, noise = 3.0, 2.0, 0.7
    for updates in (10**3, 10**5, 10**7):
        lr = min(largest_step(phi) / smoothness, math.sqrt(2 * gap / (smoothness * updates)) / noise)
        lower, product = 2 * smoothness * gap / updates, 2 * smoothness * gap
        closed = 2 * noise * math.sqrt(lower) + lower * (phi**2 + 1 / largest_step(phi))
        assert squared_gradient_bound(gap, smoothness, phi, lr, updates, noise**2) <= closed * (1 + 1e-12)
        beta, lr = tuned_momentum(gap, smoothness, updates, noise)
        whole, fresh = (descent_bound(gap, smoothness, Method(beta, 1, phi=p), lr, updates, noise) for p in (phi, 0.0))
        leading = 4 * (product * noise**2 / updates) ** 0.25
        delay = phi * product**0.75 / (math.sqrt(noise) * updates**0.75)
        assert whole - fresh == close(delay, rel=1e-6)
        assert delay / leading == close(phi * (1 - beta) / 4, rel=1e-6)
        assert whole <= leading + delay + 2 * noise**2 / math.sqrt(product * updates)
