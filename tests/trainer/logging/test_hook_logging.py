"""``self.log`` outside of steps: one value for all ranks, whatever each of them logged, and no rank waits in vain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanSquaredError

from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, evaluate, fit, loader, make_trainer

STAGES = 3


class LogsEverywhere(L.Callback):
    """Logs numbers that do not depend on the model in every hook that may; epochs and loaders average them."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log_dict({"epoch_start": 10.0 + trainer.current_epoch})

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.log("batch_start", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("batch_end", float(batch_idx**2), on_step=True, on_epoch=True)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("val_start", float(trainer.global_step))

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        module.log("val_batch_end", float(batch_idx + 1))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            module.log("val_once", 3.5, prog_bar=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("epoch_end", float(trainer.global_step))


def logged_in_hooks(result: dict[str, Any]) -> dict[str, float]:
    names = ("epoch_start", "batch_start", "batch_end_epoch", "val_start", "val_batch_end", "val_once", "epoch_end")
    return {name: result["callback_metrics"].get(name) for name in names}


@pytest.mark.parametrize("val_samples", [(16,), pytest.param((16, 8), marks=pytest.mark.slow)])
def test_hooks_log_what_they_log_in_plain_lightning(pools: Pools, val_samples: tuple[int, ...]) -> None:
    run = Run(Net, options={"microbatches": STAGES}, val_samples=val_samples, callbacks=((LogsEverywhere, {}),))
    run = replace(run, samples=36, trainer={"max_epochs": 2, "logger": "list"})
    (plain,) = pools.run(1, fit, replace(run, strategy="plain", options={}))
    results = pools.run(STAGES, fit, run)
    for result in results:
        assert logged_in_hooks(result) == pytest.approx(logged_in_hooks(plain), nan_ok=True)
    expected = {k: v for k, v in plain["callback_metrics"].items() if k.startswith("val_batch_end")}
    assert {k: v for k, v in results[-1]["callback_metrics"].items() if k.startswith("val_batch_end")} == expected
    steps = [metrics["batch_end_step"] for _, metrics in results[0]["records"] if "batch_end_step" in metrics]
    assert steps == [0.0, 1.0, 4.0, 9.0, 16.0] * 2, "a value was lost, or logged twice"


class LogsItsLoss(L.Callback):
    """Off the last stage there is no loss."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            module.log("hook_loss", outputs["loss"])


def test_a_checkpoint_that_monitors_a_hook_is_the_same_one_for_all_ranks(pools: Pools, tmp_path: Path) -> None:
    best = (ModelCheckpoint, {"dirpath": str(tmp_path), "monitor": "hook_loss", "every_n_train_steps": 2})
    run = Run(Net, options={"microbatches": STAGES}, callbacks=((LogsItsLoss, {}), best), samples=64)
    results = pools.run(STAGES, fit, replace(run, trainer={"enable_checkpointing": True}))
    assert len({result["best"] for result in results}) == 1
    assert Path(results[0]["best"]).is_file()
    assert len({result["callback_metrics"]["hook_loss"] for result in results}) == 1


class LogsOnOneStage(L.Callback):
    """As ``grad_norm`` does: the names are those of the stage's own parameters."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                module.log(f"norm/{name}", parameter.grad.norm())


def test_a_metric_that_one_stage_alone_knows_keeps_nobody_waiting(pools: Pools, tmp_path: Path) -> None:
    saving = (ModelCheckpoint, {"dirpath": str(tmp_path), "monitor": "norm/model.0.weight", "every_n_train_steps": 2})
    run = Run(Net, options={"microbatches": STAGES}, callbacks=((LogsOnOneStage, {}), saving), samples=64)
    outcomes = pools.outcomes(STAGES, fit, replace(run, trainer={"enable_checkpointing": True}), timeout=20.0)
    assert len({outcome.error for outcome in outcomes}) == 1, [outcome.error for outcome in outcomes]
    assert outcomes[0].error in ("", "MisconfigurationException")


class Collects(Net):
    """Lightning's idiom for what ``validation_epoch_end(outputs)`` once was."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.losses: list[torch.Tensor] = []

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.losses.append(torch.nn.functional.mse_loss(self.model(batch["x"]), batch["y"]))

    def on_validation_epoch_end(self) -> None:
        if self.losses:
            self.log("collected", torch.stack(self.losses).mean())
            self.losses.clear()


def test_what_the_last_stage_collected_is_logged_on_every_rank(pools: Pools) -> None:
    run = Run(Collects, options={"microbatches": 4}, val_samples=(16,))
    (one,) = pools.run(1, evaluate, run, "validate")
    ranks = pools.run(2, evaluate, run, "validate")
    assert [rank["returned"] for rank in ranks] == [one["returned"]] * 2
    assert one["returned"][0]["collected"] > 0


class SkipsRest(Net):
    """Ends the first epoch after two batches of five."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self.current_epoch == 0 else None


def test_an_epoch_that_is_cut_short_loses_no_update_and_no_metric(pools: Pools) -> None:
    run = Run(SkipsRest, options={"microbatches": STAGES}, trainer={"max_epochs": 1, "logger": "list"})
    short = replace(run, module=Net, trainer=run.trainer | {"limit_train_batches": 2})
    expected, results = pools.run(STAGES, fit, short), pools.run(STAGES, fit, run)
    for mine, theirs in zip(results, expected):
        assert all((mine["weights"][name] == theirs["weights"][name]).all() for name in theirs["weights"])
        assert mine["callback_metrics"]["train_loss_epoch"] == theirs["callback_metrics"]["train_loss_epoch"]
    logged = [
        [(s, m["train_loss_step"]) for s, m in r[0]["records"] if "train_loss_step" in m] for r in (results, expected)
    ]
    assert logged[0] == logged[1]
    assert len(logged[0]) == 2


def test_the_epoch_after_one_that_was_cut_short_has_its_own_metrics(pools: Pools) -> None:
    run = Run(SkipsRest, trainer={"max_epochs": 2, "logger": "list"}, optimizer="sgd", options={"microbatches": STAGES})
    asynchronous = pools.run(STAGES, fit, run)[0]["records"]
    counts = [sum("train_loss_step" in metrics for _, metrics in asynchronous)]
    assert counts == [7]
    epochs = [metrics["train_loss_epoch"] for _, metrics in asynchronous if "train_loss_epoch" in metrics]
    steps = [metrics["train_loss_step"] for _, metrics in asynchronous if "train_loss_step" in metrics]
    assert epochs == pytest.approx([sum(steps[:2]) / 2, sum(steps[2:]) / 5], rel=1e-5)


def outputs_of_steps(run: Run) -> list[list[str]]:
    """What callbacks see as ``outputs`` after each batch."""
    seen: list[list[str]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([f"{name} {tuple(value.shape)} {value.requires_grad}" for name, value in outputs.items()])

    make_trainer(run, callbacks=[Looks()]).fit(run.module(run), loader(run))
    return seen


class ReturnsPredictions(Net):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        predictions = self.model(batch["x"])
        return {"loss": torch.nn.functional.mse_loss(predictions, batch["y"]), "predictions": predictions}


def test_what_a_step_returns_beside_the_loss_is_there_on_the_last_stage(pools: Pools) -> None:
    last, first = pools.run(2, outputs_of_steps, Run(ReturnsPredictions, samples=20, options={"microbatches": 2}))
    sizes = (8, 8, 4)
    assert [sorted(names) for names in last] == [["loss () False", f"predictions ({n}, 1) False"] for n in sizes]
    assert first == [[]] * 3


class UsesMetric(Net):
    """Logs a torchmetrics object, and computes with it where an epoch ends."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        predictions = self.model(batch["x"])
        self.train_error(predictions, batch["y"])
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        return torch.nn.functional.mse_loss(predictions, batch["y"])

    def on_train_epoch_end(self) -> None:
        self.log("train_root", self.train_error.compute().sqrt())

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.val_error.update(self.model(batch["x"]), batch["y"])
        self.log("val_error", self.val_error)

    def on_validation_epoch_end(self) -> None:
        self.log("val_root", self.val_error.compute().sqrt())


@pytest.mark.filterwarnings("ignore")
def test_metrics_can_be_computed_once_more_where_an_epoch_ends(pools: Pools) -> None:
    run = Run(UsesMetric, "sync", {"microbatches": 2}, val_samples=(16,), trainer={"max_epochs": 2, "logger": "list"})
    (plain,) = pools.run(1, fit, replace(run, strategy="plain", options={}))
    names = ("train_error", "train_error_epoch", "train_root", "val_error", "val_root")
    expected = {name: plain["callback_metrics"][name] for name in names}
    for rank in pools.run(2, fit, run):
        assert {name: rank["callback_metrics"][name] for name in names} == pytest.approx(expected, rel=1e-5)
