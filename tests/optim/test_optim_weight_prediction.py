"""Weight prediction follows its formula, also if delays differ between parameters or change during a run."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import WeightPrediction
from tests.optim.test_optim_error_feedback import BASES, make_params, set_gradients, train


def predict(base, params, steps, reach):
    """Train by the formula: the parameters hold W = Y - reach * u, with Y the base trajectory and u the last step."""
    y = [p.detach().clone() for p in params.values()]
    for step in steps:
        set_gradients(params, step)
        before = [p.detach().clone() for p in params.values()]
        base.step()
        with torch.no_grad():
            for i, (p, b) in enumerate(zip(params.values(), before)):
                u = b - p
                y[i] = y[i] - u
                p.copy_(y[i] - reach * u)


@pytest.mark.parametrize("base", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize(("delay", "ahead"), [(1, 0.0), (3, 0.0), (1, 1.5), (0, 0.5)])
def test_formula(base, delay, ahead):
    params, twin = make_params(), make_params()
    optimizer = WeightPrediction(params.items(), BASES[base], ahead=ahead)
    optimizer.set_delay(delay)
    train(optimizer, params, range(6))
    predict(BASES[base](twin.items()), twin, range(6), delay + ahead)
    for p, q in zip(params.values(), twin.values()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_parameters_of_different_delays_are_corrected_each_by_its_own():
    delays = dict(zip(make_params(), (2, 1, 0, 0.5)))
    mixed = make_params()
    optimizer = WeightPrediction(mixed.items(), BASES["adamw"])
    optimizer.set_delay({mixed[name]: delay for name, delay in delays.items()})
    train(optimizer, mixed, range(5))
    for name, delay in delays.items():
        alike = make_params()
        twin = WeightPrediction(alike.items(), BASES["adamw"])
        twin.set_delay(delay)
        train(twin, alike, range(5))
        assert torch.equal(mixed[name], alike[name]), name


@pytest.mark.parametrize("ahead", [0.0, 1.0])
@pytest.mark.parametrize("resume_at", [None, 3, 4, 6])
def test_it_goes_on_along_the_trajectory_of_the_base_when_a_delay_begins_or_ends(ahead, resume_at):
    """W = Y - (h + a) u holds with the current h, also after resuming where the delay changes, or later."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    make = partial(WeightPrediction, [p], partial(torch.optim.SGD, lr=0.1), ahead=ahead)
    optimizer, base = make(), torch.zeros(2, dtype=torch.float64)
    for t in range(8):
        if t == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(state)
        delay = int(3 <= t < 6)
        optimizer.set_delay(delay)
        p.grad = torch.full((2,), t + 1.0, dtype=torch.float64)
        optimizer.step()
        base -= 0.1 * (t + 1)
        torch.testing.assert_close(p.detach(), base - (delay + ahead) * 0.1 * (t + 1))
