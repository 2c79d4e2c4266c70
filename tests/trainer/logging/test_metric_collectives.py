"""Metrics: collections of them, and how often ranks exchange them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, evaluate, loader, make_trainer, val_loaders

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
    make_trainer(run, callbacks=[counts]).fit(run.module(run), loader(run), val_loaders(run))
    return counts.calls


class BarrierPerBatch(L.Callback):
    """What must not happen."""

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.barrier()


def numbers_of_collectives(what: str, samples: int) -> list[int]:
    """In an evaluation, or in validations of a training; with a barrier per batch for ``"barriers"``."""
    run = Run(Net, val_samples=(samples,), trainer={"max_epochs": 2})
    if what == "fit":
        return fit_and_count(run)
    run = replace(run, callbacks=((BarrierPerBatch, {}),) if what == "barriers" else ())
    with counted_collectives() as called:
        evaluate(run, "validate")
    return [len(called)]


@pytest.mark.parametrize("what", ["validate", "fit", "barriers"])
def test_collectives_of_an_evaluation_do_not_grow_with_its_batches(pools: Pools, what: str) -> None:
    few, many = (pools.run(2, numbers_of_collectives, what, 8 * batches) for batches in (2, 12))
    growth = 10 if what == "barriers" else 0  # which would be seen
    assert [[number + growth for number in rank] for rank in few] == many
    assert all(number > 0 for number in few[0])
