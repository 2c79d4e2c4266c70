"""Corrections saved, copied, loaded, and with groups or state assigned from outside."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import (
    ErrorFeedback,
    WeightPrediction,
)
from tests.optim.correction_references import (
    BASES,
    CASES,
    STEPS,
    STOPS_WITHOUT_DELAY,
    make_params,
    train,
)


@pytest.mark.parametrize("copying", ["state_dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("case", CASES)
def test_state_continues_bitwise(case, copying):
    correction, _, options = CASES[case]
    params = make_params()
    optimizer = correction(params.items(), BASES["muon"], **options)
    optimizer.set_delay(2)
    train(optimizer, params, range(4))
    if copying == "state_dict":
        twins = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
        twin = correction(twins.items(), BASES["muon"], **options)
        twin.set_delay(2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twin.load_state_dict(torch.load(file, weights_only=True))
    elif copying == "deepcopy":
        twin, twins = copy.deepcopy((optimizer, params))
    else:
        file = io.BytesIO()
        torch.save((optimizer, params), file)
        file.seek(0)
        twin, twins = torch.load(file, weights_only=False)
    train(optimizer, params, range(4, STEPS))
    train(twin, twins, range(4, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twins.values()))


@pytest.mark.parametrize("case", CASES)
def test_lent_weights_equal_the_snapshot_bitwise(case):
    correction, _, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer, other = (correction(p.items(), BASES["adamw"], **options) for p in (params, twin))
    train(other, twin, range(STEPS))
    for step in range(STEPS):
        with optimizer.weights_before({p: p.detach().clone() for p in params.values()}):
            train(optimizer, params, [step])
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))


@pytest.mark.parametrize("case", CASES)
def test_a_state_of_another_correction_is_refused(case):
    correction, _, options = CASES[case]
    plain = BASES["adamw"](make_params().items())
    optimizer = correction(make_params().items(), BASES["adamw"], **options)
    with pytest.raises(ValueError, match=f"saved without {correction.__name__}"):
        optimizer.load_state_dict(plain.state_dict())


def test_groups_assigned_to_the_wrapper_reach_the_base():
    """Lightning's finetuning callbacks assign them when a run goes on."""
    params, added = make_params(), nn.Parameter(torch.ones(2))
    optimizer = ErrorFeedback(params.items(), partial(torch.optim.SGD, lr=0.1))
    groups = [*optimizer.param_groups, {**optimizer.param_groups[0], "params": [added], "lr": 0.0}]
    optimizer.param_groups = groups
    train(optimizer, params, range(2))
    assert optimizer.base.param_groups is groups
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_a_state_loaded_into_the_inner_correction_is_what_the_outer_steps_with():
    def make(outer, lr):
        params = {"w": nn.Parameter(torch.ones(4, 3))}
        inner = partial(WeightPrediction, base=partial(torch.optim.SGD, lr=lr))
        return params, ErrorFeedback(params.items(), inner) if outer else inner(params.items())

    params, saved = make(outer=False, lr=0.5)
    train(saved, params, range(2))
    params, optimizer = make(outer=True, lr=0.1)
    optimizer.base.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == optimizer.base.base.param_groups[0]["lr"] == 0.5
    optimizer.state = {}
    assert optimizer.base.base.state is optimizer.state


@pytest.mark.parametrize("case", STOPS_WITHOUT_DELAY)
def test_a_state_loads_without_delay_and_its_buffers_are_dropped(case):
    correction, _, options = CASES[case]
    params = make_params()
    optimizer = correction(params.items(), BASES["adamw"], **options)
    train(optimizer, params, range(3))
    fresh = correction(make_params().items(), BASES["adamw"], **options)
    fresh.set_delay(0)
    fresh.load_state_dict(optimizer.state_dict())
    assert not any(fresh.state_dict()[correction.state_name].get(name) for name in correction.buffer_names)
