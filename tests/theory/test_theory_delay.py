"""Sections 1 and 2 of docs/research/theory.md: the delayed iteration, and gradient descent on quadratics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.optim import ErrorFeedback
from lightning_asyncpp.reference import train_reference
from tests.theory.iterations import Method, Rule, run_method
from tests.theory.problems import LeastSquares
from tests.theory.spectra import best, delay_limit, rate, stability_limit


def newest_version(stage: Schedule, micro_batches: int, mini_batches: int) -> list[int]:
    """For every mini-batch, the updates that could have been applied before its first forward on this stage."""
    backwards, versions = 0, []
    for action in stage.run(mini_batches, micro_batches):
        if action.kind is Kind.BACKWARD:
            backwards += 1
        elif action.kind is Kind.FORWARD and action.index % micro_batches == 0:
            versions.append(backwards // micro_batches)
    return versions


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_gradients_are_one_update_old_for_any_depth_with_enough_micro_batches(num_stages: int, lookahead: int) -> None:
    micro_batches = 2 * num_stages
    stages = [Schedule(s, num_stages, lookahead) for s in range(num_stages)]
    newest = [newest_version(stage, micro_batches, 6) for stage in stages]
    for t in range(6):
        oldest_over_stages = min(versions[t] for versions in newest)
        assert oldest_over_stages >= stages[0].stage_rule.version(t)
        if num_stages > 1:  # ... and on the first stage nothing newer exists
            assert oldest_over_stages == max(t - 1, 0)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_stage_that_runs_ahead_sees_weights_that_are_as_old_as_it_is_ahead(micro_batches: int) -> None:
    """With one micro-batch per update: original PipeDream, delay P - 1 - s."""
    for stage in (Schedule(s, 5) for s in range(5)):
        ahead = 5 - 1 - stage.stage
        expected = [max(t - math.ceil(ahead / micro_batches), 0) for t in range(12)]
        assert newest_version(stage, micro_batches, 12) == expected


@pytest.mark.parametrize(
    "method",
    [Method(), Method(0.9, 1), Method(0.9, 2), Method(0, 1, 1.0), Method(0.9, 1, 1.0), Method(0.9, 1, 0.5)],
    ids=str,
)
def test_the_packages_oracle_runs_the_iteration_of_this_page(method: Method) -> None:
    problem = LeastSquares()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=method.beta, dampening=method.beta)
    train_reference(
        problem.model,
        problem.loss,
        [[problem.inputs]] * 20,
        optimizer,
        micro_batches=2,
        delay=method.delay,
        error_feedback=method.strength or None,
    )
    np.testing.assert_allclose(problem.weights(), problem.expected(method, 0.1, 20).weights[-1], rtol=1e-12)


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_the_packages_error_feedback_takes_the_steps_of_this_page(strength: float) -> None:
    problem = LeastSquares()
    [parameter] = problem.model.parameters()
    optimizer = ErrorFeedback(
        [parameter], lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9), strength=strength
    )
    run = problem.expected(Method(0.9, 1, strength), 0.1, 20)
    for t in range(20):
        parameter.grad = torch.from_numpy(problem.gradient(run.weights[max(t - 1, 0)]))
        optimizer.step()
        np.testing.assert_allclose(problem.weights(), run.weights[t + 1], rtol=1e-12)


def scalar(eigenvalue: float) -> Rule:
    return lambda w: np.asarray(eigenvalue * w)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5])
def test_the_stability_limit_of_a_delay_follows_the_sine_formula(delay: int) -> None:
    limit = delay_limit(delay)
    assert stability_limit(Method(delay=delay)) == pytest.approx(limit, rel=1e-9)
    for factor, stays_bounded in ((0.97, True), (1.03, False)):
        run = run_method(Method(delay=delay), scalar(1.0), np.ones(1), lr=factor * limit, updates=3000)
        assert (np.abs(run.weights[-20:]).max() < 1) == stays_bounded


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_the_best_rate_of_a_delay_is_d_over_d_plus_one(delay: int) -> None:
    h, factor = best(Method(delay=delay))
    assert h == pytest.approx(delay**delay / (delay + 1) ** (delay + 1), rel=1e-4)
    assert factor == pytest.approx(delay / (delay + 1), rel=1e-3)


@pytest.mark.parametrize("h", [0.05, 0.2, 0.6, 0.9])
def test_iterations_shrink_at_the_rate_of_the_largest_root(h: float) -> None:
    expected = (1 + math.sqrt(1 - 4 * h)) / 2 if h < 0.25 else math.sqrt(h)
    assert rate(Method(delay=1), h) == pytest.approx(expected, rel=1e-12)
    weights = run_method(Method(delay=1), scalar(h), np.ones(1), lr=1.0, updates=400).weights
    # averaged over many updates: complex roots oscillate
    envelope = [float(np.abs(weights[i : i + 40]).max()) for i in (40, 340)]
    assert (envelope[1] / envelope[0]) ** (1 / 300) == pytest.approx(expected, rel=2e-3)
