"""What a Fabric loop's step sets around the model holds on all stages, whatever the loop's precision is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy
from tests.core.cases import DIM, make_model
from tests.fabric.runs import make_fabric
from tests.trainer.pool import Pools

CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "nothing": nullcontext,
}


def train(delayed: bool, precision: Any, context: str, mode: str = "") -> tuple[dict[str, np.ndarray], Any]:
    """A loop of five batches and an evaluation; what this rank has afterwards."""
    least: dict[str, Any] = {"delay": "least", "stages": 3, "micro_batches": 3}
    strategy: Any = DelayedGradientStrategy(**least) if delayed else AsyncPipelineStrategy(micro_batches=3)
    fabric = make_fabric(strategy, precision)
    net = make_model()
    if delayed:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.02))
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.02))

    def predicted(x: torch.Tensor) -> torch.Tensor:
        if mode:
            model.train(mode == "train")
        with CONTEXTS[context]():
            return model(x).float()

    for t in range(5):
        x = torch.randn(9, DIM, generator=torch.Generator().manual_seed(t))
        strategy.training_step(lambda x: F.mse_loss(predicted(x), x.sum(1, keepdim=True)), x)
        optimizer.step()
        optimizer.zero_grad()
    strategy.flush()
    evaluated = strategy.evaluation_step(predicted, x)
    weights = {name: p.detach().float().numpy().copy() for name, p in net.named_parameters()}
    return weights, None if evaluated is None else evaluated.float().numpy()


@pytest.mark.parametrize(
    ("precision", "context"), [("32-true", "autocast"), ("bf16-mixed", "disabled"), ("bf16-mixed", "nothing")]
)
def test_autocast(pools: Pools, precision: str, context: str) -> None:
    results = pools.run(3, train, False, precision, context)
    ((expected, evaluated),) = pools.run(1, train, True, precision, context)
    together = {name: array for weights, _ in results for name, array in weights.items()}
    assert together.keys() == expected.keys()
    assert all(np.array_equal(array, expected[name]) for name, array in together.items())
    assert np.array_equal(results[0][1], evaluated)


@pytest.mark.parametrize(
    ("context", "mode", "says"),
    [("no_grad", "", "another switch of gradients"), ("nothing", "eval", "train() or eval() on model")],
)
def test_refused(pools: Pools, context: str, mode: str, says: str) -> None:
    for outcome in pools.outcomes(2, train, False, "32-true", context, mode):
        assert outcome.error == "ConfigurationError", outcome.trace
        assert says in outcome.message
