"""``self.log`` outside of steps: one value for all ranks, whatever each of them logged, and no rank waits in vain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS
from tests.helpers.trainer import Net, Run, fit, loader, make_trainer

STAGES = 3


class LogsEverywhere(L.Callback):
    """Logs numbers that do not depend on the model in every hook that may; epochs and loaders average them."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log_dict({"epoch_start": 10.0 + trainer.current_epoch})

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.log("batch_start", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("batch_end", float(batch_idx**2), on_step=True, on_epoch=True)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any) -> None:
        module.log("val_batch_end", float(index + 1))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            module.log("val_once", 3.5, prog_bar=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("epoch_end", float(trainer.global_step))


class UsesMetrics(Net):
    """Logs a collection of torchmetrics objects, and computes one where the epoch ends."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.train_error = MeanSquaredError()
        self.seen = MetricCollection(
            {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}, prefix="train_"
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        predictions = self.model(batch["x"])
        self.train_error(predictions, batch["y"])
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        self.seen(predictions, batch["y"])
        self.log_dict(self.seen, on_step=False, on_epoch=True)
        return F.mse_loss(predictions, batch["y"])

    def on_train_epoch_end(self) -> None:
        self.log("train_root", self.train_error.compute().sqrt())


@pytest.mark.filterwarnings("ignore")
def test_hooks_log_what_they_log_in_plain_lightning(pools: Pools) -> None:
    """On every rank, although the last stage alone has losses."""
    run = Run(UsesMetrics, "sync", {"microbatches": STAGES}, val_samples=(16,), callbacks=((LogsEverywhere, {}),))
    run = replace(run, samples=36, trainer={"max_epochs": 2, "logger": "list"})
    plain, results = fit(replace(run, strategy="plain", options={})), pools.run(STAGES, fit, run)
    assert {"train_root", "val_once", "epoch_end", "train_mae"} <= plain["callback_metrics"].keys()
    for result in results:
        assert result["callback_metrics"] == pytest.approx(plain["callback_metrics"], rel=1e-5)
    steps = [metrics["batch_end_step"] for _, metrics in results[0]["records"] if "batch_end_step" in metrics]
    assert steps == [0.0, 1.0, 4.0, 9.0, 16.0] * 2, "a value was lost, or logged twice"


class LogsItsLoss(L.Callback):
    """Off the last stage there is no loss."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            module.log("found", outputs["loss"])


class LogsOnOneStage(L.Callback):
    """As ``grad_norm`` does: the names are those of the stage's own parameters."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        for name, parameter in module.named_parameters():
            if name == "model.0.weight" and parameter.grad is not None:
                module.log("found", parameter.grad.norm())


@pytest.mark.parametrize("callback", [LogsItsLoss, LogsOnOneStage])
def test_a_checkpoint_that_monitors_what_one_stage_logs_keeps_nobody_waiting(
    pools: Pools, callback: Any, tmp_path: Path
) -> None:
    """It is the same one for all ranks, or refused on all."""
    best = (ModelCheckpoint, {"dirpath": str(tmp_path), "monitor": "found", "every_n_train_steps": 2})
    run = Run(Net, options={"microbatches": STAGES}, callbacks=((callback, {}), best), samples=64)
    outcomes = pools.outcomes(STAGES, fit, replace(run, trainer={"enable_checkpointing": True}), timeout=20.0)
    (error,) = {outcome.error for outcome in outcomes}
    if callback is LogsItsLoss:
        (path,) = {outcome.value["best"] for outcome in outcomes}
        assert Path(path).is_file()
    else:
        assert error in ("", "MisconfigurationException")


class SkipsRest(Net):
    """Ends the first epoch after two batches of five."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self.current_epoch == 0 else None


def test_an_epoch_that_is_cut_short_loses_no_update_and_no_metric() -> None:
    """And the next one has its own."""
    run = Run(SkipsRest, options={"microbatches": STAGES}, trainer={"max_epochs": 2, "logger": "list"})
    short = replace(run, module=Net, trainer={"max_epochs": 1, "logger": "list", "limit_train_batches": 2})
    (expected,), (found,) = (ONE_PROCESS.run(STAGES, fit, of) for of in (short, run))
    assert found["records"][: len(expected["records"])] == expected["records"]
    steps, epochs = (
        [metrics[name] for _, metrics in found["records"] if name in metrics]
        for name in ("train_loss_step", "train_loss_epoch")
    )
    assert epochs == pytest.approx([sum(steps[:2]) / 2, sum(steps[2:]) / 5], rel=1e-5)


class ReturnsPredictions(Net):
    """Callbacks and hooks see what a step returns, on the last stage."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        predictions = self.model(batch["x"])
        return {"loss": F.mse_loss(predictions, batch["y"]), "predictions": predictions}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not any(value.requires_grad for value in outputs.values())
        self.seen.append({name: tuple(value.shape) for name, value in outputs.items()})


def outputs_of_steps(run: Run) -> list[dict[str, Any]]:
    module = ReturnsPredictions(run)
    make_trainer(run).fit(module, loader(run))
    return module.seen


def test_what_a_step_returns_beside_the_loss_is_there_on_the_last_stage(pools: Pools) -> None:
    last, first = pools.run(2, outputs_of_steps, Run(Net, samples=20, options={"microbatches": 2}))
    assert last == [{"loss": (), "predictions": (n, 1)} for n in (8, 8, 4)]
    assert first == [{}] * 3
