"""Gradients that are not finite, losses of nothing, and other ways to clip than by the norm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp.errors import NonFiniteGradientError
from lightning_asyncpp.reference import train_reference
from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, batches_of, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, arrays, delayed, fit, make_trainer, staged, train


class PoisonedNet(Net):
    """One sample of the third batch is NaN."""

    def train_dataloader(self) -> Any:
        data = Samples(self.run.samples)
        data.x[20] = float("nan")
        return DataLoader(data, batch_size=self.run.batch_size)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_batch_whose_gradient_is_not_finite_is_skipped(strategy: str) -> None:
    run = Run(PoisonedNet, strategy, {"nonfinite_gradients": "skip"}, trainer={"gradient_clip_val": 0.5})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(staged(run, 2))
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in module.train_dataloader()],
        run.make_base(list(module.named_parameters())), microbatches=2, delay=0 if strategy == "sync" else 1,
        max_norm=0.5, weight=lambda batch: float(len(batch["x"])), skip_nonfinite=True, seed=run.seed,
    )  # fmt: skip
    weights = arrays(dict(module.named_parameters()))
    assert all(np.isfinite(array).all() for array in weights.values())
    assert_equal_weights(result["weights"], weights)
    assert result["global_step"] == 5
    (warned,) = (str(warning.message) for warning in caught if "NaN" in str(warning.message))
    assert "mini-batch 2: its gradient holds NaN or Inf; the update was skipped" in warned


def fit_until_it_stops(run: Run) -> dict[str, np.ndarray]:
    """The weights that a run was left with whose gradient was not finite."""
    module = run.module(run)
    torch.manual_seed(run.seed)
    with pytest.raises(NonFiniteGradientError, match=r"the gradient of mini-batch 2 holds NaN or Inf"):
        make_trainer(run).fit(module)
    return arrays(dict(module.named_parameters()))


def test_a_gradient_that_is_not_finite_stops_all_ranks(pools: Pools) -> None:
    """The default; the weights are those before the update that it would have been."""
    run = Run(PoisonedNet)
    weights = [{"weights": weights} for weights in pools.run(2, fit_until_it_stops, run)]
    assert_equal_weights(joined_weights(weights, 2), oracle(run, 2, [[b] for b in batches_of(run, 0)[:2]])[0])


class ClippingNet(Net):
    """Decides by itself how gradients are clipped: ``self.clip_gradients`` clips by the norm over all stages."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_clipping_by_the_module_and_by_value(strategy: str) -> None:
    """By value every element on its own: no stage has to know of another."""
    by_value = {"max_epochs": 2, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    own = Run(ClippingNet, strategy, optimizer="sgd", trainer={"max_epochs": 2})
    run = Run(Net, strategy, optimizer="sgd", trainer=by_value)
    batches = list(mini_batches_of(run, 2))

    def clip_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(parameters, 0.02))
        return lambda: None

    whole = oracle(run, 2, batches)[0]
    for clipped, how in ((run, {"after_update": clip_first}), (own, {"max_norm": 0.05})):
        expected = oracle(run, 2, batches, **how)[0]  # type: ignore[arg-type]
        assert_equal_weights(train(staged(clipped, 2))["weights"], expected)
        assert any(not np.array_equal(expected[name], whole[name]) for name in whole)


class Idle(nn.Linear):
    """Parameters that get no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class IdleNet(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), Idle(2, 2), nn.Linear(DIM, 1))


def test_clipping_where_a_stage_has_no_gradient(pools: Pools) -> None:
    run = Run(IdleNet, options={"microbatches": 3}, optimizer="sgd", trainer={"gradient_clip_val": 0.02})
    assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), train(staged(run, 1))["weights"])


class LabelledNet(Net):
    """Its loss is a mean over the targets that count, which some batches lack; its weights stay."""

    def train_dataloader(self) -> Any:
        data = Samples(36)
        data.y = torch.ones(36, dtype=torch.int64)
        data.y[list(range(12, 24) if self.run.seed == 1 else (*range(12, 16), *range(32, 36)))] = -100
        return DataLoader(data, batch_size=12)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["x"]).expand(-1, 2) * torch.tensor([1.0, -1.0])
        loss = F.cross_entropy(logits, batch["y"])
        count = int((batch["y"] >= 0).sum())
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=count or len(batch["x"]))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_microbatch_without_a_target_is_left_out_of_the_mean(pools: Pools) -> None:
    """Its loss is NaN, and its gradient finite; a batch without any stays NaN."""
    run = Run(LabelledNet, options={"microbatches": 3})
    plain, one = train(delayed(run, microbatches=1)), train(staged(run))
    ranks = pools.run(3, fit, run)
    assert one["losses"] == ranks[0]["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    for result in (one, *ranks):
        assert result["callback_metrics"]["train_loss_epoch"] == pytest.approx(
            plain["callback_metrics"]["train_loss_epoch"], rel=1e-6
        )
    nothing = train(staged(replace(run, seed=1)))
    assert [math.isnan(loss) for loss in nothing["losses"]] == [False, True, False]
    assert math.isnan(nothing["callback_metrics"]["train_loss_epoch"])
