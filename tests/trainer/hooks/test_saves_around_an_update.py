"""What saves, gathers weights or drains while an update is applied, or in a step, is refused alike everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, delayed, fit, loader, make_trainer, report, train

HOOKS = ("before the step", "clipping", "pre hook", "post hook")


class Tries(Net):
    """Goes on when it is refused."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.met: dict[str, set[str]] = {hook: set() for hook in HOOKS}

    def calls(self) -> list[Callable[[], object]]:
        trainer, strategy = self.trainer, self.trainer.strategy
        path = os.path.join(trainer.default_root_dir, "refused.ckpt")
        own: list[Callable[[], object]] = [
            getattr(strategy, name) for name in ("full_state_dict", "drain") if hasattr(strategy, name)
        ]
        return [
            lambda: trainer.save_checkpoint(path, weights_only=False),
            lambda: trainer.save_checkpoint(path, weights_only=True),
            lambda: strategy.load_model_state_dict({}),
            *own,
        ]

    def meet(self, hook: str) -> None:
        for call in self.calls():
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


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("async", {}, marks=pytest.mark.slow),
        ("async", {"staleness": "least"}),
        pytest.param("async", {"staleness": "least", "slack": "exact"}, marks=pytest.mark.slow),
        pytest.param("async", {"weight_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("sync", {}, marks=pytest.mark.slow),
    ],
)
def test_while_an_update_is_applied(pools: Pools, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    """Whoever takes note of the refusal and goes on trains as if nothing was."""
    trainer = {"gradient_clip_val": 0.5, "default_root_dir": str(tmp_path)}
    if "weight_dtype" in options:
        trainer["precision"] = "bf16-mixed"
    run = Run(Net, strategy, {"microbatches": 4, **options}, trainer)
    expected = joined_weights(pools.run(2, fit, run), 2)
    results = pools.run(2, fit_trying, replace(run, module=Tries))
    assert_equal_weights(joined_weights(results, 2), expected)
    emulated = fit_trying(delayed(replace(run, module=Tries), delay=1, microbatches=4))
    for hook in HOOKS:
        for result in (*results, emulated):
            (said,) = result["met"][hook]
            assert "cannot be gathered, saved, loaded or evaluated while an update is applied" in said
    assert not list(tmp_path.glob("*.ckpt"))


class SavesBetween(Net):
    """Where the pipeline may be drained: around the batch, and in Lightning's closure before the step."""

    def save(self) -> None:
        path = os.path.join(self.trainer.default_root_dir, "between.ckpt")
        self.trainer.save_checkpoint(path, weights_only=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.save()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.save()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        self.save()


@pytest.mark.parametrize("staleness", ["least", pytest.param("uniform", marks=pytest.mark.slow)])
def test_elsewhere_a_save_is_a_drain(pools: Pools, tmp_path: Path, staleness: str) -> None:
    trainer = {"gradient_clip_val": 0.5, "default_root_dir": str(tmp_path)}
    run = Run(Net, "async", {"microbatches": 4, "staleness": staleness}, trainer, samples=24)
    expected = joined_weights(pools.run(2, fit, run), 2)
    assert_equal_weights(joined_weights(pools.run(2, fit, replace(run, module=SavesBetween)), 2), expected)
    assert train(delayed(replace(run, module=SavesBetween), delay=1, microbatches=4))["global_step"] == 3
