"""Gradients that are not finite, and other ways to clip than by the norm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpp.errors import NonFiniteGradientError
from lightning_asyncpp.reference import train_reference
from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, batches_of, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, arrays, fit, make_trainer


class PoisonedNet(Net):
    """One sample of the third batch is NaN."""

    def train_dataloader(self) -> Any:
        data = Samples(self.run.samples)
        data.x[20] = float("nan")
        return DataLoader(data, batch_size=self.run.batch_size)


def fit_and_listen(run: Run) -> dict[str, Any]:
    """What the run came to, what it warned of, and the weights it was left with."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module)
        except NonFiniteGradientError as raised:
            error = f"{type(raised).__name__}: {raised}"
    warned = [str(warning.message) for warning in caught if "NaN" in str(warning.message)]
    return {"weights": arrays(dict(module.named_parameters())), "warned": warned, "error": error} | {
        "steps": trainer.global_step
    }


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_batch_whose_gradient_is_not_finite_is_skipped(pools: Pools, strategy: str) -> None:
    run = Run(PoisonedNet, strategy, {"nonfinite_gradients": "skip"}, trainer={"gradient_clip_val": 0.5})
    results = pools.run(2, fit_and_listen, run)
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in module.train_dataloader()],
        run.make_base(list(module.named_parameters())), microbatches=2, delay=0 if strategy == "sync" else 1,
        max_norm=0.5, weight=lambda batch: float(len(batch["x"])), skip_nonfinite=True, seed=run.seed,
    )  # fmt: skip
    weights = arrays(dict(module.named_parameters()))
    assert all(np.isfinite(array).all() for array in weights.values())
    assert_equal_weights(joined_weights(results, 2), weights)
    assert [result["steps"] for result in results] == [5, 5]
    assert len(results[0]["warned"]) == 1
    assert "mini-batch 2: its gradient holds NaN or Inf; the update was skipped" in results[0]["warned"][0]


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_gradient_that_is_not_finite_stops_all_ranks(pools: Pools, strategy: str) -> None:
    """The default; the weights are those before the update that it would have been."""
    run = Run(PoisonedNet, strategy)
    results = pools.run(2, fit_and_listen, run)
    for result in results:
        assert "NonFiniteGradientError: the gradient of mini-batch 2 holds NaN or Inf" in result["error"]
        assert "nonfinite_gradients='skip'" in result["error"]
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, [[b] for b in batches_of(run, 0)[:2]])[0])


class ClippingNet(Net):
    """Decides by itself how gradients are clipped."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_module_that_clips_by_itself(pools: Pools, strategy: str) -> None:
    """``self.clip_gradients`` clips by the norm over all stages."""
    run = Run(ClippingNet, strategy, optimizer="sgd", trainer={"max_epochs": 2})
    results = pools.run(2, fit, run)
    clipped, whole = (oracle(run, 2, list(mini_batches_of(run, 2)), max_norm=norm)[0] for norm in (0.05, None))
    assert_equal_weights(joined_weights(results, 2), clipped)
    assert any(not np.array_equal(clipped[name], whole[name]) for name in clipped)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_clipping_by_value(pools: Pools, strategy: str) -> None:
    """Every element on its own: no stage has to know of another."""
    run = Run(Net, strategy, optimizer="sgd")
    trainer = {"max_epochs": 2, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    results = pools.run(2, fit, replace(run, trainer=trainer))

    def clip_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(parameters, 0.02))
        return lambda: None

    batches = list(mini_batches_of(run, 2))
    clipped, whole = oracle(run, 2, batches, after_update=clip_first)[0], oracle(run, 2, batches)[0]
    assert_equal_weights(joined_weights(results, 2), clipped)
    assert any(not np.array_equal(clipped[name], whole[name]) for name in clipped)


class Idle(nn.Linear):
    """Parameters that get no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class IdleNet(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), Idle(2, 2), nn.Linear(DIM, 1))


@pytest.mark.parametrize("algorithm", ["norm", pytest.param("value", marks=pytest.mark.slow)])
def test_clipping_where_a_stage_has_no_gradient(pools: Pools, algorithm: str) -> None:
    trainer = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    run = Run(IdleNet, options={"microbatches": 3}, optimizer="sgd", trainer=trainer)
    three, one = (joined_weights(pools.run(stages, fit, run), stages) for stages in (3, 1))
    assert_equal_weights(three, one)
