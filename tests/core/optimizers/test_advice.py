"""Who trains a plain Adam with few micro-batches is told what to set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from lightning_asyncpp.core.optimizers.advice import advice_on_micro_batches
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW


class OwnAdamW(AdamW):
    """A subclass of a user's."""


def advice(make: Callable[..., Optimizer], micro_batches: int) -> str | None:
    return advice_on_micro_batches(make(list(nn.Linear(2, 2).named_parameters())), 2, micro_batches)


@pytest.mark.parametrize("kind", [Adam, AdamW, NAdam, RAdam, OwnAdamW])
def test_a_plain_adam_is_told(kind: type[Optimizer]) -> None:
    said = advice(kind, 7)
    assert said is not None
    assert f"{kind.__name__} with micro_batches=7 on 2 stages" in said
    assert "With micro_batches=8, four per stage" in said
    assert "guides/choosing/#if-the-delay-costs-too-much" in said
    assert advice(kind, 8) is None


@pytest.mark.parametrize("other", [partial(ErrorFeedback, base=AdamW), MuonAdamW, partial(SGD, lr=0.1)])
def test_nobody_else_is(other: Callable[..., Optimizer]) -> None:
    assert advice(other, 2) is None
