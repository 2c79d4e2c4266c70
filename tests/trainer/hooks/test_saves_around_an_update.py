"""What saves, gathers weights or drains while an update is applied is refused alike everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.projections import Changing
from tests.helpers.trainer import Net, Run, fit, loader, make_trainer, report, staged, train

HOOKS = ("before the step", "clipping", "pre hook", "post hook")


class Tries(Net):
    """Goes on when it is refused."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.met: dict[str, set[str]] = {hook: set() for hook in HOOKS}

    def meet(self, hook: str) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        path = os.path.join(trainer.default_root_dir, "refused.ckpt")
        calls: list[Callable[[], object]] = [
            lambda: trainer.save_checkpoint(path), lambda: strategy.load_model_state_dict({}),
            strategy.full_state_dict, strategy.drain,
        ]  # fmt: skip
        for call in calls:
            try:
                call()
                self.met[hook].add("")
            except RuntimeError as error:
                self.met[hook].add(str(error))

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


def fit_trying(run: Run) -> dict[str, Any]:
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run))
    return report(trainer, module) | {"met": module.met}


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
    """Whoever takes note of the refusal and goes on trains as if nothing was."""
    trainer = {"gradient_clip_val": 0.5, "default_root_dir": str(tmp_path)}
    run = Run(Net, "default", {"microbatches": 4}, trainer)
    expected = train(staged(run, 2))["weights"]
    trying = replace(run, module=Tries)
    results, alone = pools.run(2, fit_trying, trying), fit_trying(staged(trying, 2))
    assert_equal_weights(joined_weights(results, 2), expected)
    assert_equal_weights(alone["weights"], expected)
    for result in (*results, alone):
        for hook in HOOKS:
            (refusal,) = result["met"][hook]
            assert "while an update is applied" in refusal
    assert not list(tmp_path.glob("*.ckpt"))
    saving = pools.run(2, fit, replace(run, module=SavesBetween))
    assert_equal_weights(joined_weights(saving, 2), expected)
