"""Error Feedback follows its formula and identities, and behaves as optimizers are expected to."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.optim.error_feedback import feed_back

BASES = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "muon": partial(MuonAdamW, lr=0.02, newton_schulz_dtype="float32"),
}
SHAPES = {"up.weight": (6, 4), "up.bias": (6,), "embed.weight": (5, 4), "scale": ()}


def make_params():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(params, step):
    """Set gradients that depend on the weights, so that a wrong weight affects later steps."""
    for i, p in enumerate(params.values()):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        p.grad = p.detach().sin() + noise


def train(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def train_by_hand(base, params, steps, strength):
    """Train by the recursion of the paper, written out in full."""
    tensors, previous = list(params.values()), None
    for step in steps:
        before = [p.detach().clone() for p in tensors]
        set_gradients(params, step)
        base.step()
        u = [b - p.detach() for b, p in zip(before, tensors)]
        if previous is not None:
            with torch.no_grad():
                for p, b, new, old in zip(tensors, before, u, previous):
                    p.copy_(b - (new + strength * (new - old)))
        previous = u


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("base", BASES)
def test_formula(base, strength):
    params, by_hand = make_params(), make_params()
    optimizer = ErrorFeedback(params.items(), BASES[base], strength=strength)
    train(optimizer, params, range(6))
    train_by_hand(BASES[base](by_hand.items()), by_hand, range(6), strength)
    for p, q in zip(params.values(), by_hand.values()):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-6)


def test_bf16_buffer_telescopes():
    """Rounding errors do not add up: after any number of steps, only those of the first and the last step remain."""
    p, tolerance = torch.zeros(50, dtype=torch.float64), 1e-12
    previous = torch.zeros(50, dtype=torch.bfloat16)
    y, steps = p.clone(), []
    for t in range(200):
        u = torch.randn(50, generator=torch.Generator().manual_seed(t)).double() * 0.01
        before = p.clone()
        p.sub_(u)
        steps.append(before - p)
        y -= u
        feed_back(p, before, previous, 1.0 if t else 0.0)
    rounded = [steps[i].bfloat16().double() for i in (0, -1)]
    torch.testing.assert_close(p, y - rounded[1] + rounded[0], rtol=0, atol=tolerance)
    bound = 2**-8 * max(steps[0].abs().max(), steps[-1].abs().max())  # about half a unit in bfloat16's last place
    assert (p - (y - steps[-1] + steps[0])).abs().max() <= 2 * bound + tolerance


@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_do_not_change_bits(transposed, monkeypatch):
    monkeypatch.setattr("lightning_asyncpp.optim.error_feedback.CPU_CHUNK_ELEMENTS", 3)
    before, weight, previous = (torch.randn(7, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))
    u = before - weight
    expected = weight - (u - previous)
    weight, previous = (t.T.contiguous().T if transposed else t for t in (weight, previous))
    feed_back(weight, before, previous, 1.0)
    assert torch.equal(weight, expected)
    assert torch.equal(previous, u)


@pytest.mark.parametrize("base", BASES)
def test_delay_zero_is_the_base_bitwise_and_keeps_nothing(base):
    params, plain = make_params(), make_params()
    optimizer = ErrorFeedback(params.items(), BASES[base])
    optimizer.set_delay(0)
    train(optimizer, params, range(4))
    train(BASES[base](plain.items()), plain, range(4))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), plain.values()))
    assert not any("previous_step" in state for state in optimizer.state.values())


def test_parameters_without_gradient():
    """Without a gradient, u = 0, so the last step's extrapolation is undone. What never moved needs no state."""
    p, never = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3))
    optimizer = ErrorFeedback([p, never], partial(torch.optim.SGD, lr=1.0))
    expected = torch.ones(3, dtype=torch.float64)
    previous = None
    for gradient in (None, 0.5, 0.25, None, None, 1.0):
        p.grad = None if gradient is None else torch.full_like(p, gradient)
        optimizer.step()
        u = gradient or 0.0
        expected -= u + (0.0 if previous is None else u - previous)
        previous = u if previous is not None or gradient else None  # the first step is not corrected, whenever it comes
        assert torch.equal(p.detach(), expected)
    assert never.eq(1).all()
    assert list(optimizer.state_dict()["state"]) == [0]


def test_a_copy_goes_on_bitwise():
    params = make_params()
    optimizer = ErrorFeedback(params.items(), BASES["adamw"])
    train(optimizer, params, range(3))
    copied, copied_optimizer = copy.deepcopy((params, optimizer))
    assert copied_optimizer.param_groups is copied_optimizer.base.param_groups
    train(optimizer, params, range(3, 6))
    train(copied_optimizer, copied, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), copied.values()))


@pytest.mark.parametrize("wrong", [{"base": torch.optim.SGD([torch.ones(1)])}, {"base": list, "buffer_dtype": "bf16"}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=r"^base=SGD\(\.\.\.\): must be a |^buffer_dtype='bf16': must be '"):
        ErrorFeedback([], **wrong)


def test_a_closure_is_evaluated_once_before_the_weights_move():
    params, reference = make_params(), make_params()
    optimizer = ErrorFeedback(params.items(), BASES["sgd"])
    for step in range(3):
        optimizer.step(lambda step=step: set_gradients(params, step))
    train(ErrorFeedback(reference.items(), BASES["sgd"]), reference, range(3))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), reference.values()))


def test_a_share_of_the_delay_is_a_share_of_the_strength():
    params, reference = make_params(), make_params()
    optimizer = ErrorFeedback(params.items(), BASES["sgd"], strength=2.0)
    optimizer.set_delay(0.25)
    train(optimizer, params, range(4))
    train(ErrorFeedback(reference.items(), BASES["sgd"], strength=0.5), reference, range(4))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), reference.values()))
