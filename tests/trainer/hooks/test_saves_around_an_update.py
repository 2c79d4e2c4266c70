"""What saves, gathers weights or drains while an update is applied is refused alike everywhere."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.projections import Changing
from tests.helpers.trainer import Net, Run, fit, staged, train


class Tries(Net):
    """Saves, loads, gathers and drains around an update, and goes on when it is refused."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.met: set[str] = set()

    def meet(self, hook: str) -> None:
        self.met.add(hook)
        trainer, strategy = self.trainer, self.trainer.strategy
        save = partial(trainer.save_checkpoint, os.path.join(trainer.default_root_dir, "refused.ckpt"))
        for call in (save, partial(strategy.load_model_state_dict, {}), strategy.full_state_dict, strategy.drain):
            with pytest.raises(RuntimeError, match="while an update is applied"):
                call()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.meet("before the step")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.meet("clipping")
        super().configure_gradient_clipping(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.meet("pre hook"))
        optimizer.register_step_post_hook(lambda *_: self.meet("post hook"))
        return optimizer

    def on_train_end(self) -> None:
        assert self.met == {"before the step", "clipping", "pre hook", "post hook"}


class SavesBetween(Net):
    """Where the pipeline may be drained: around the batch, and in Lightning's closure before the step."""

    def save(self) -> None:
        self.trainer.save_checkpoint(os.path.join(self.trainer.default_root_dir, "between.ckpt"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.save()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.save()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        self.save()


class SavesLate(Changing):
    """Is called in the middle of the next batch."""

    def change(self, batch_idx: int) -> None:
        self.trainer.strategy.full_state_dict()


def test_who_gathers_between_two_updates_is_refused(pools: Pools) -> None:
    for outcome in pools.outcomes(2, fit, Run(SavesLate, options={"microbatches": 2})):
        assert outcome.error == "ConfigurationError"
        assert "in the middle of the next batch" in outcome.message


def test_it_is_refused_in_an_update_and_a_drain_between_updates(pools: Pools, tmp_path: Path) -> None:
    """Whoever goes on after the refusal trains as if nothing was."""
    trainer = {"gradient_clip_val": 0.5, "default_root_dir": str(tmp_path)}
    run = Run(Net, "default", {"microbatches": 4}, trainer)
    expected, trying = train(staged(run, 2))["weights"], replace(run, module=Tries)
    assert_equal_weights(joined_weights(pools.run(2, fit, trying), 2), expected)
    assert_equal_weights(train(staged(trying, 2))["weights"], expected)
    assert not list(tmp_path.glob("*.ckpt"))
    saving = pools.run(2, fit, replace(run, module=SavesBetween))
    assert_equal_weights(joined_weights(saving, 2), expected)
