"""Metrics: collections of them, and how often ranks exchange them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, evaluate, fit, loader, make_trainer, val_loaders


class CollectionNet(Net):
    """Logs collections of metrics with ``log_dict``; in validation two of them share their state."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen = MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()}, prefix="train_")
        errors = {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}
        self.validated = MetricCollection(errors, prefix="val_")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        out = self.model(batch["x"])
        self.seen(out, batch["y"])
        self.log_dict(self.seen, on_step=False, on_epoch=True)
        return F.mse_loss(out, batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.update(self.model(batch["x"]), batch["y"])
        self.log_dict(self.validated)


def test_metric_collection(pools: Pools) -> None:
    """The values of every epoch are those of a plain run, on all ranks."""
    run = Run(CollectionNet, "sync", optimizer="sgd", samples=37, val_samples=(13,))
    run = replace(run, trainer={"max_epochs": 3, "logger": "list"})
    results = pools.run(2, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    for name in ("train_mse", "train_mae", "val_mse", "val_rmse", "val_mae"):
        mine, theirs = ([m[name] for _, m in r["records"] if name in m] for r in (results[0], plain))
        assert len(mine) == 3
        assert mine == pytest.approx(theirs, rel=1e-4), name
        assert results[1]["callback_metrics"][name] == pytest.approx(mine[-1], rel=1e-6)
    assert results[0]["callback_metrics"]["val_rmse"] ** 2 == pytest.approx(
        results[0]["callback_metrics"]["val_mse"], rel=1e-5
    )


COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "scatter",
)  # fmt: skip


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called meanwhile, also by Lightning and torchmetrics."""
    called: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("async_op"):  # nobody waits for the others
                called.append(name)
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in originals.items():
        setattr(dist, name, counting(name, function))
    try:
        yield called
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class BarrierPerBatch(L.Callback):
    """What must not happen."""

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.barrier()


def count_in_evaluation(run: Run, what: str) -> list[str]:
    with counted_collectives() as called:
        evaluate(run, what)
    return called


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_collectives_of_an_evaluation_do_not_grow_with_its_batches(pools: Pools, what: str) -> None:
    few, many = (pools.run(2, count_in_evaluation, Run(Net, val_samples=(8 * n,)), what) for n in (2, 12))
    assert few == many
    assert few[0]


def test_collectives_are_counted(pools: Pools) -> None:
    run = Run(Net, callbacks=((BarrierPerBatch, {}),))
    few, many = (pools.run(2, count_in_evaluation, replace(run, val_samples=(8 * n,)), "validate") for n in (2, 12))
    assert [len(b) - len(a) for a, b in zip(few, many)] == [10, 10]


class CountsInValidation(L.Callback):
    """Counts the collectives between the first and the last hook of a validation in training."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_validation_start(self, *args: Any) -> None:
        self.context = counted_collectives()
        self.called = self.context.__enter__()

    def on_validation_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)
        self.calls.append(len(self.called))


def fit_and_count(run: Run) -> list[int]:
    counts = CountsInValidation()
    L.seed_everything(run.seed, verbose=False)
    make_trainer(run, callbacks=[counts]).fit(run.module(run), loader(run), val_loaders(run))
    return counts.calls


def test_collectives_of_a_validation_in_training(pools: Pools) -> None:
    """One exchange at the loader's end, however many batches it has."""
    run = Run(Net, trainer={"max_epochs": 2})
    few, many = (pools.run(2, fit_and_count, replace(run, val_samples=(8 * n,))) for n in (2, 12))
    assert few == many
    assert [len(calls) for calls in few] == [2, 2]
    assert all(count > 0 for calls in few for count in calls)
