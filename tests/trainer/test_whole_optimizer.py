"""With optimizers that are written for one process, stages train as a plain Trainer does, with the same state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer, staged, train


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


def muon(parameters: Any) -> Any:
    return MuonAdamW(parameters, lr=0.02, newton_schulz_dtype="float32")


Makes = dict[str, Callable[[L.LightningModule], Any]]
OPTIMIZERS: Makes = {
    "rate by number of parameters": lambda module: AdamW(
        module.parameters(), lr=2.0 / sum(p.numel() for p in module.parameters())
    ),
    "one cycle": one_cycle,
    "plateau": plateau,
    "biases": lambda module: AdamW([p for n, p in module.named_parameters() if n.endswith("bias")], lr=0.01),
    "names": lambda module: SGD(module.named_parameters(), lr=0.05, momentum=0.9),
    "state at once": lambda module: Adagrad(module.parameters(), lr=0.05),
    "Muon": lambda module: muon(module.named_parameters()),
}
NOT_IN_A_PLAIN_TRAINER: Makes = {
    "unnamed Muon": lambda module: muon(module.parameters()),
    "unnamed Muon in Error Feedback": lambda module: ErrorFeedback(module.parameters(), muon),
    "Error Feedback of two groups": lambda module: ErrorFeedback(
        two_groups(module).param_groups, lambda params: AdamW(params, lr=0.01)
    ),
}


class Made(Net):
    """Module that uses one of the optimizers above, and clips gradients in its own hook."""

    def configure_optimizers(self) -> Any:
        return {**OPTIMIZERS, **NOT_IN_A_PLAIN_TRAINER}[self.run.optimizer](self)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        by_value = self.run.optimizer == "names"
        limit, algorithm = (0.02, "value") if by_value else (0.3, "norm")
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)


def run_of(optimizer: str) -> Run:
    return Run(Made, "sync", {"microbatches": 2}, {"max_epochs": 2}, optimizer=optimizer, samples=24)


def saved(run: Run, folder: Path) -> Run:
    callbacks = (saving(folder, every_n_train_steps=3),)
    return replace(run, callbacks=callbacks, trainer={**run.trainer, "enable_checkpointing": True})


def assert_close(actual: Any, expected: Any, where: str = "") -> None:
    """Check that numbers and tensors are equal up to rounding, and that everything else is equal."""
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
    """Weights, and the states of the optimizer and its scheduler in a checkpoint, equal those of a plain Trainer."""
    run = run_of(name)
    expected = train(saved(replace(run, strategy="plain"), tmp_path / "plain"))
    found = train(saved(staged(run), tmp_path / "stages"))
    assert_close(found["weights"], expected["weights"])
    one, other = (torch.load(tmp_path / kind / "step=6.ckpt", weights_only=True) for kind in ("stages", "plain"))
    for entry in ("optimizer_states", "lr_schedulers", "state_dict"):
        assert_close(one[entry], other[entry], entry)


def test_names_come_from_the_module() -> None:
    unnamed, named = (train(staged(run_of(name)))["weights"] for name in ("unnamed Muon", "Muon"))
    assert_equal_weights(unnamed, named)


@pytest.mark.parametrize("name", NOT_IN_A_PLAIN_TRAINER)
def test_async_goes_on_with_other_stages(name: str, tmp_path: Path) -> None:
    """A resume with another number of stages gives bitwise equal weights, since no state depends on the cut."""
    run = replace(run_of(name), strategy="async", options={"microbatches": 3})
    whole = train(saved(staged(run, 2), tmp_path))["weights"]
    assert_equal_weights(train(staged(replace(run, ckpt_path=str(tmp_path / "step=3.ckpt")), 3))["weights"], whole)


def test_checkpoints_are_plain_both_ways(pools: Pools, tmp_path: Path) -> None:
    """A plain Trainer resumes from a pipeline's checkpoint, with its optimizer state, and vice versa."""
    run = run_of("one cycle")
    plain = replace(run, strategy="plain", options={})
    theirs, ours = str(tmp_path / "plain" / "step=3.ckpt"), str(tmp_path / "stages" / "step=3.ckpt")
    expected = train(saved(plain, tmp_path / "plain"))["weights"]
    assert_close(joined_weights(pools.run(2, fit, saved(run, tmp_path / "stages")), 2), expected)
    assert_close(joined_weights(pools.run(2, fit, replace(run, ckpt_path=theirs)), 2), expected)
    assert_close(train(replace(plain, ckpt_path=ours))["weights"], expected)


def fit_twice(run: Run, validate: bool) -> tuple[dict[str, np.ndarray], list[int]]:
    """Train a module twice, or validate and train it, with one optimizer; return its weights and its groups' sizes."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    optimizer = two_groups(module)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    for what in ("validate" if validate else "fit", "fit"):
        getattr(make_trainer(run), what)(module, loader(run))
    return arrays(dict(module.named_parameters())), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("validate", [True, False])
def test_an_optimizer_that_was_made_before(pools: Pools, validate: bool) -> None:
    """An optimizer that was made before a run holds the whole model again after it, and can be reused."""
    run = run_of("one cycle")
    expected, sizes = fit_twice(replace(run, strategy="plain"), validate)
    results = pools.run(2, fit_twice, run, validate)
    assert_close({name: value for weights, _ in results for name, value in weights.items()}, expected)
    assert [found for _, found in results] == [sizes] * 2


class Configured(Net):
    """Module without arguments, for a user's own ``LightningCLI``."""

    def __init__(self) -> None:
        super().__init__(Run(Net))

    def train_dataloader(self) -> DataLoader:
        return loader(self.run)


def trained_by_command(*options: str) -> dict[str, np.ndarray]:
    arguments = ["optimizer=AdamW", "optimizer.lr=0.01", "lr_scheduler=CosineAnnealingLR", "lr_scheduler.T_max=3"]
    arguments += [f"trainer.{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
    arguments += ["seed_everything=1", "trainer.accelerator=cpu", "trainer.max_epochs=2", *options]
    made = LightningCLI(Configured, args=["fit", *map("--{}".format, arguments)], save_config_callback=None)
    return arrays(dict(made.model.named_parameters()))


def test_optimizers_of_the_command_line(pools: Pools) -> None:
    strategy = ("strategy=lightning_asyncpp.SyncPipelineStrategy", "strategy.microbatches=2", "devices=2")
    last, first = pools.run(2, trained_by_command, *(f"trainer.{option}" for option in strategy))
    assert_close(first | last, trained_by_command("trainer.devices=1"))
