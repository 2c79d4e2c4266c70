"""User code around an update has the same effect as in one process, or ends the run on every rank."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools, impatient
from tests.helpers.projections import Changing, parameters_of
from tests.helpers.trainer import Net, Run, fit, loader, make_trainer, report, staged, train, val_loaders
from tests.trainer.idioms.optimization import EverySecondBatch

LEAST = {"microbatches": 4, "partition": "uniform"}


def fit_noting(run: Run) -> dict[str, Any]:
    """Train, and also return what the module noted and the next random number."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run), val_loaders(run))
    return report(trainer, module) | {"noted": module.noted, "next": torch.rand(()).item()}


class Counts(Net):
    """Model whose hooks note step, epoch and learning rate; in those of an update, saving and draining must fail."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.noted: list[tuple[str, int, int, float]] = []

    def see(self, name: str) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.noted.append((name, self.trainer.global_step, self.current_epoch, round(rate, 6)))

    def see_and_try(self, name: str) -> None:
        self.see(name)
        trainer, strategy = self.trainer, self.trainer.strategy
        save = partial(trainer.save_checkpoint, os.path.join(trainer.default_root_dir, "refused.ckpt"))
        for call in (save, partial(strategy.load_model_state_dict, {}), strategy.full_state_dict, strategy.drain):
            with pytest.raises(RuntimeError, match="while an update is applied"):
                call()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see_and_try("before step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.see_and_try("clipping")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(f"end of {batch_idx}")

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["optimizer"].register_step_pre_hook(lambda *_: self.see_and_try("pre hook"))
        made["optimizer"].register_step_post_hook(lambda *_: self.see_and_try("post hook"))
        return made


def test_hooks_of_an_update_see_the_step_of_its_batch_and_cannot_drain(pools: Pools, tmp_path: Path) -> None:
    """A run whose hooks catch the refusals trains as one that did not try to save or drain."""
    run = Run(Counts, options={"microbatches": 3}, scheduler="decay-step", val_samples=(9,))
    trainer = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": 2}
    run = replace(run, trainer={**trainer, "default_root_dir": str(tmp_path)})
    one, ranks = fit_noting(staged(run, 1)), pools.run(3, fit_noting, run)
    assert {name for name, *_ in one["noted"]} >= {"before step", "clipping", "pre hook", "post hook", "end of 0"}
    assert [rank["noted"] for rank in ranks] == [one["noted"]] * 3
    expected = train(staged(replace(run, module=Net), 1))["weights"]
    assert_equal_weights(joined_weights(ranks, 3), expected)
    assert_equal_weights(one["weights"], expected)
    assert not list(tmp_path.glob("*.ckpt"))


class ClipsBySchedule(Net):
    """Model that sets its clipping limit as a batch begins; the previous batch's update must not use it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.gradient_clip_val = 0.02 * 0.5**batch_idx


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_a_batch_is_clipped_by_its_own_limit(pools: Pools, algorithm: str) -> None:
    """Updates are clipped as in a run that drains after every batch, also over ranks, which share the norm."""
    run = Run(ClipsBySchedule, "default", LEAST, {"gradient_clip_algorithm": algorithm}, optimizer="sgd")
    drained = replace(run, val_samples=(8,), trainer=run.trainer | {"val_check_interval": 1})
    expected = train(staged(drained))["weights"]
    assert_equal_weights(train(staged(run))["weights"], expected)
    if algorithm == "norm":
        assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), expected)


class NoisyGradients(Net):
    """Model that trains on random gradients alone, and draws random numbers before gradients are zeroed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.noted: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.noted += [float(torch.rand(())), random.random(), float(np.random.random())]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.randn_like(parameter) * (1 + 0.1 * random.random() + 0.1 * np.random.random())


def test_noise_of_an_update_is_that_of_the_stage_and_the_update(pools: Pools) -> None:
    run = Run(NoisyGradients, "default", LEAST, optimizer="sgd", val_samples=(8,))
    expected = fit_noting(staged(run, 2))
    last, first = pools.run(2, fit_noting, replace(run, trainer={"val_check_interval": 2}))
    assert_equal_weights(joined_weights([last, first], 2), expected["weights"])
    assert not set(last["noted"]) & set(first["noted"]), "two stages drew the same"
    assert len(set(last["noted"])) == len(last["noted"]), "two batches drew the same"
    assert last["next"] == first["next"], "the process's generators were not put back"


class DecidesByItsLoss(Net):
    """Model that steps only if the closure returns a loss, so ranks without the loss take part in no update."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if optimizer_closure() is not None:
            optimizer.step()


def test_ranks_that_decide_differently_end_at_once(pools: Pools) -> None:
    outcomes = pools.outcomes(2, impatient, fit, Run(DecidesByItsLoss, options={"microbatches": 2}))
    assert {outcome.error for outcome in outcomes} == {"ProtocolError", "PeerLostError"}


def test_a_batch_without_a_step_is_dropped_as_in_a_single_process() -> None:
    plain = train(Run(EverySecondBatch, "plain"))
    for name, weights in train(Run(EverySecondBatch, "delayed", {"delay": 0, "microbatches": 1}))["weights"].items():
        assert plain["weights"][name] == pytest.approx(weights, abs=1e-6)


class SavesBetween(Net):
    """Model that saves where the pipeline may drain: around the batch, and in Lightning's closure before the step."""

    def save(self) -> None:
        self.trainer.save_checkpoint(os.path.join(self.trainer.default_root_dir, "between.ckpt"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.save()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.save()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        self.save()


def test_a_drain_between_two_updates_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    run = Run(SavesBetween, "default", {"microbatches": 4}, {"default_root_dir": str(tmp_path)})
    expected = train(staged(replace(run, module=Net), 2))["weights"]
    assert_equal_weights(joined_weights(pools.run(2, fit, run), 2), expected)


class SavesLate(Changing):
    """Model that gathers the weights in a hook called in the middle of the next batch."""

    def change(self, batch_idx: int) -> None:
        self.trainer.strategy.full_state_dict()


def test_who_gathers_between_two_updates_is_refused(pools: Pools) -> None:
    for outcome in pools.outcomes(2, fit, Run(SavesLate, options={"microbatches": 2})):
        assert outcome.error == "ConfigurationError"
        assert "after the update of its batch, during the next batch" in outcome.message
