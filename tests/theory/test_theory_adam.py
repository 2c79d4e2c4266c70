"""Section 6 of docs/theory.md: what can be shown of Adam under delay on a small example."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.theory.iterations import Adam, Method, train
from tests.theory.problems import adam_floor, logistic_gradient
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


def test_a_stale_gradient_meets_no_staler_second_moment() -> None:
    """The step of delayed Adam is a function of the gradients it was given: m and v come from the same ones."""
    run = train(logistic_gradient, np.linspace(-2, 2, 5), Adam(0.9, 0.95), lr=0.05, updates=50, delay=1)
    fresh = Adam(0.9, 0.95)
    for t in range(50):
        gradient = logistic_gradient(run.weights[max(t - 1, 0)])
        np.testing.assert_allclose(run.steps[t], 0.05 * fresh(gradient), rtol=1e-12)


METHODS = [Method(0.9, d, s, n) for n in (False, True) for d, s in ((0, 0.0), (1, 0.0), (1, 1.0))]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_adam_oscillates_at_its_stability_limit(method: Method) -> None:
    predicted = 1 / stability_limit(method)
    assert adam_floor(method, 0.95) == pytest.approx(predicted, rel=0.08)
    assert adam_floor(method, 0.98) == pytest.approx(predicted, rel=0.04)


def test_noise_makes_the_price_of_the_delay_small_for_adam_too() -> None:
    fresh, delayed = adam_floor(Method(0.9), 0.95, noise=0.1), adam_floor(Method(0.9, 1), 0.95, noise=0.1)
    assert fresh < delayed < 1.05 * fresh
