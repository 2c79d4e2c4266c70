"""Who trains on delayed gradients with a plain Adam and few micro-batches is told what to set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.pipeline.optimizers.advice import advice_on_micro_batches
from lightning_asyncpp.pipeline.settings import PipelineSettings


class OwnAdamW(AdamW):
    """A subclass of a user's."""


def advice(make: Callable[..., Optimizer], micro_batches: int | None, delay: int = 1, staleness: str = "least") -> str:
    settings = PipelineSettings(micro_batches=micro_batches, delay=delay, staleness=staleness)  # type: ignore[arg-type]
    return advice_on_micro_batches(make([torch.nn.Parameter(torch.ones(2, 2))]), settings.resolved(2)) or ""


@pytest.mark.parametrize("kind", [Adam, AdamW, NAdam, RAdam, OwnAdamW])
def test_a_plain_adam_is_told(kind: type[Optimizer]) -> None:
    said = advice(kind, None)
    assert f"{kind.__name__} with micro_batches=2 on 2 stages" in said
    assert "micro_batches=8 (four per stage)" in said
    assert "guides/choosing/#if-the-delay-costs-too-much" in said
    assert advice(kind, 7)


@pytest.mark.parametrize(
    "silent",
    [
        partial(advice, AdamW, 8),
        partial(advice, AdamW, None, 0, "uniform"),
        partial(advice, AdamW, None, 1, "uniform"),
        partial(advice, partial(ErrorFeedback, base=AdamW), None),
        partial(advice, MuonAdamW, None),
        partial(advice, partial(SGD, lr=0.1), None),
    ],
    ids=["enough", "synchronous", "all equally old", "corrected", "Muon", "SGD"],
)
def test_nobody_else_is(silent: Callable[[], str]) -> None:
    assert not silent()
