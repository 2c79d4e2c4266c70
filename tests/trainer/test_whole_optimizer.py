"""Optimizers as they are written for one process: stages train what a plain Trainer trains, with the same state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Net, Run, Samples, arrays, fit, loader, make_trainer, staged, train


def two_groups(module: L.LightningModule) -> Any:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    return AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.02}], lr=0.01)


def one_cycle(module: L.LightningModule) -> Any:
    optimizer = two_groups(module)
    total = int(module.trainer.estimated_stepping_batches)
    return [optimizer], [{"scheduler": OneCycleLR(optimizer, [0.05, 0.02], total), "interval": "step"}]


def plateau(module: L.LightningModule) -> Any:
    optimizer = two_groups(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


def unnamed_muon(parameters: Any) -> Any:
    return MuonAdamW(parameters, lr=0.02, newton_schulz_dtype="float32")


OPTIMIZERS: dict[str, Callable[[L.LightningModule], Any]] = {
    "two groups": two_groups,
    "rate by number of parameters": lambda module: AdamW(
        module.parameters(), lr=2.0 / sum(p.numel() for p in module.parameters())
    ),
    "one cycle": one_cycle,
    "plateau": plateau,
    "biases": lambda module: AdamW([p for n, p in module.named_parameters() if n.endswith("bias")], lr=0.01),
    "names": lambda module: SGD(module.named_parameters(), lr=0.05, momentum=0.9),
    "fused": lambda module: AdamW(module.parameters(), lr=0.01, fused=True),
    "state at once": lambda module: Adagrad(module.parameters(), lr=0.05),
    "Muon": lambda module: unnamed_muon(module.named_parameters()),
}
BY_CORRECTIONS: dict[str, Callable[[L.LightningModule], Any]] = {
    "unnamed Muon in Error Feedback": lambda module: ErrorFeedback(module.parameters(), unnamed_muon),
    "Error Feedback of two groups": lambda module: ErrorFeedback(
        two_groups(module).param_groups, lambda params: AdamW(params, lr=0.01)
    ),
}


class Made(Net):
    """Its optimizer is one of those above."""

    def configure_optimizers(self) -> Any:
        return {**OPTIMIZERS, **BY_CORRECTIONS, "unnamed Muon": lambda module: unnamed_muon(module.parameters())}[
            self.run.optimizer
        ](self)


class DealtOut(Made):
    """Replicas share every batch."""

    def train_dataloader(self) -> DataLoader:
        given = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        replicas, replica = given["num_replicas"], given["rank"]
        return DataLoader(Subset(Samples(40), range(replica, 40, replicas)), batch_size=8 // replicas)


def run_of(optimizer: str, module: Any = Made, **more: Any) -> Run:
    return Run(module, "sync", {"microbatches": 2}, {"max_epochs": 2, **more}, optimizer=optimizer)


def saved(run: Run, folder: Path) -> Run:
    callbacks = (saving(folder, every_n_train_steps=5),)
    return replace(run, callbacks=callbacks, trainer={**run.trainer, "enable_checkpointing": True})


def assert_close(actual: Any, expected: Any, where: str = "") -> None:
    """Numbers and tensors but for rounding, everything else equal."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, (one, other) in enumerate(zip(actual, expected)):
            assert_close(one, other, f"{where}[{number}]")
    elif isinstance(expected, (float, torch.Tensor, np.ndarray)):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6, err_msg=where)
    else:
        assert actual == expected, where


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_train_as_a_plain_trainer(name: str, tmp_path: Path) -> None:
    """The weights, and the whole state of the optimizer and its scheduler, as a plain checkpoint holds it."""
    run = run_of(name, gradient_clip_val=0.3)
    expected = train(saved(replace(run, strategy="plain"), tmp_path / "plain"))
    found = train(saved(staged(run), tmp_path / "stages"))
    assert_close(found["weights"], expected["weights"])
    one, other = (torch.load(tmp_path / kind / "step=10.ckpt", weights_only=True) for kind in ("stages", "plain"))
    for entry in ("optimizer_states", "lr_schedulers", "state_dict"):
        assert_close(one[entry], other[entry], entry)


def test_names_come_from_the_module() -> None:
    unnamed, named = (train(staged(run_of(name)))["weights"] for name in ("unnamed Muon", "Muon"))
    assert_equal_weights(unnamed, named)


@pytest.mark.parametrize("name", BY_CORRECTIONS)
def test_async_goes_on_with_other_stages(name: str, tmp_path: Path) -> None:
    """Bitwise: no state depends on the cut."""
    run = replace(run_of(name), strategy="async", options={"microbatches": 3})
    whole = train(saved(staged(run, 2), tmp_path))["weights"]
    assert_equal_weights(train(staged(replace(run, ckpt_path=str(tmp_path / "step=5.ckpt")), 3))["weights"], whole)


def test_replicas_train_as_one_process(pools: Pools) -> None:
    run = run_of("two groups", DealtOut)
    expected = train(replace(run, strategy="plain"))["weights"]
    for result in pools.run(4, fit, replace(run, options={"microbatches": 2, "data_parallel_size": 2})):
        assert_close(result["weights"], {name: expected[name] for name in result["weights"]})


@pytest.mark.parametrize("other", ["plain", pytest.param("ddp", marks=pytest.mark.slow)])
def test_checkpoints_are_plain_both_ways(pools: Pools, other: str, tmp_path: Path) -> None:
    """What ranks of a pipeline saved a plain Trainer or DDP goes on from, with its optimizer, and the other way."""
    run, first = run_of("one cycle"), "step=5.ckpt"
    theirs, ranks = replace(run, strategy=other, options={}), 1 if other == "plain" else 2
    trained = joined_weights(pools.run(2, fit, saved(run, tmp_path / "stages")), 2)
    pools.run(ranks, fit, saved(theirs, tmp_path / other))
    path = str(tmp_path / other / first)
    resumed = joined_weights(pools.run(2, fit, replace(run, ckpt_path=path)), 2)
    assert_close(resumed, train(replace(run, strategy="plain", options={}, ckpt_path=path))["weights"])
    back = pools.run(ranks, fit, replace(theirs, ckpt_path=str(tmp_path / "stages" / first)))[0]["weights"]
    if other == "plain":  # DDP's ranks read halves of the data
        assert_close(back, trained)


def fit_twice(run: Run, validate: bool) -> tuple[dict[str, np.ndarray], list[int]]:
    """Train a module twice, or validate it before, with an optimizer that was made at the beginning."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    optimizer = two_groups(module)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    if validate:
        make_trainer(run).validate(module, loader(run), verbose=False)
    else:
        make_trainer(run).fit(module, loader(run))
    make_trainer(run).fit(module, loader(run))
    return arrays(dict(module.named_parameters())), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("validate", [True, False])
def test_an_optimizer_that_was_made_before(pools: Pools, validate: bool) -> None:
    """It holds the whole model again afterwards, so that it can be used once more."""
    run = run_of("two groups")
    expected, sizes = fit_twice(replace(run, strategy="plain"), validate)
    results = pools.run(2, fit_twice, run, validate)
    assert_close({name: value for weights, _ in results for name, value in weights.items()}, expected)
    assert [found for _, found in results] == [sizes] * 2
