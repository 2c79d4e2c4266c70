"""Forms of the Newton-Schulz iteration, and states saved when there was another choice of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW, NorMuonAdamW
from lightning_asyncpp.optim.newton_schulz import orthogonalize


def decaying(rows: int, columns: int, smallest: float = 1e-2, seed: int = 0) -> torch.Tensor:
    """A matrix (1, rows, columns) whose singular values fall from 1 to ``smallest`` like those of gradients."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(
        torch.randn(rows, columns, generator=generator, dtype=torch.float64), full_matrices=False
    )
    return (u * torch.logspace(0, torch.tensor(smallest).log10().item(), min(rows, columns)) @ v)[None]


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_zero_stays_zero_beside_others(form):
    x = torch.stack([torch.zeros(6, 20), torch.randn(6, 20, generator=torch.Generator().manual_seed(0))])
    result = orthogonalize([x], form=form)
    assert result[0].eq(0).all()
    assert result[1].isfinite().all()


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [(24, 80), (80, 24), (50, 60)])
def test_forms_agree(steps, shape):
    x = torch.cat([decaying(*shape), decaying(*shape, smallest=1e-3, seed=1)])
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3), (torch.bfloat16, 0.1)):
        direct = orthogonalize([x], dtype=dtype, steps=steps)
        gram = orthogonalize([x], dtype=dtype, steps=steps, form="gram")
        assert (gram - direct).norm() <= tolerance * direct.norm(), dtype
        assert gram.shape == direct.shape


def step(optimizer, p):
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
    optimizer.step()


@pytest.mark.parametrize("make", [MuonAdamW, NorMuonAdamW])
def test_the_form_reaches_the_iteration(make):
    results = []
    for form in ("direct", "gram"):
        p = nn.Parameter(torch.zeros(8, 20))
        step(make([("w", p)], newton_schulz_dtype="float32", newton_schulz_form=form), p)
        results.append(p.detach())
    assert not torch.equal(*results)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"newton_schulz": "quintic", "newton_schulz_scale": "frobenius"}, id="other polynomials"),
        pytest.param(None, id="no forms"),
    ],
)
@pytest.mark.parametrize("make", [MuonAdamW, NorMuonAdamW])
def test_a_state_from_when_there_was_another_choice_goes_on_as_it_did(make, more):
    p, q = (nn.Parameter(torch.ones(8, 20)) for _ in range(2))
    optimizer, loading = make([("w", p)]), make([("w", q)], newton_schulz_form="gram")
    saved = optimizer.state_dict()
    if more is None:
        del saved["param_groups"][0]["newton_schulz_form"]
    else:
        saved["param_groups"][0].update(more)
    loading.load_state_dict(saved)
    assert loading.param_groups[0].keys() == optimizer.param_groups[0].keys()
    step(optimizer, p)
    step(loading, q)
    assert torch.equal(p, q)


@pytest.mark.parametrize("make", [MuonAdamW, NorMuonAdamW])
@pytest.mark.parametrize(
    "more", [{"newton_schulz": "polar_express"}, {"newton_schulz_scale": "schatten4"}, {"newton_schulz_scale": "aol"}]
)
def test_a_state_of_an_iteration_that_is_no_more_is_refused_and_changes_nothing(make, more):
    optimizer = make([("w", nn.Parameter(torch.ones(8, 20)))])
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {**more, "lr": 7.0}
    ((key, value),) = more.items()
    with pytest.raises(ValueError, match=f"saved with {key}='{value}', which there is no more"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] != 7.0


def test_a_wrong_form_is_named():
    with pytest.raises(ValueError, match="direct, gram"):
        MuonAdamW([("w", nn.Parameter(torch.ones(2, 2)))], newton_schulz_form="long")
