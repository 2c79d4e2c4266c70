"""Values are logged in steps and hooks with the step that they belong to, and are the same on all ranks."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.modules import MetricNet, SumsAndExtremes
from tests.helpers.oracle import batches_of, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS
from tests.helpers.trainer import Net, Run, fit, loader, make_trainer

SAMPLES, SIZES = 37, (8, 8, 8, 8, 5)


def weighted(losses: list[float]) -> float:
    return sum(loss * size for loss, size in zip(losses, SIZES)) / SAMPLES


def test_files_hold_every_step_once(pools: Pools, tmp_path: Path) -> None:
    """Callbacks see the metrics of their own batch on rank 0, and those of the last drain on other ranks."""
    trainer = {"logger": "files", "default_root_dir": str(tmp_path), "max_epochs": 2}
    run = Run(Net, samples=SAMPLES, trainer=trainer)
    results = pools.run(3, fit, run)
    _, losses = oracle(run, 3, list(mini_batches_of(run, 2)))
    with next(tmp_path.glob("lightning_logs/version_*/metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["train_loss_step"]]
    assert [(int(row["step"]), row["epoch"]) for row in steps] == [(step, str(step // 5)) for step in range(10)]
    assert [float(row["train_loss_step"]) for row in steps] == pytest.approx(losses, rel=1e-6)
    epochs = [float(row["train_loss_epoch"]) for row in rows if row["train_loss_epoch"]]
    assert epochs == pytest.approx([weighted(losses[:5]), weighted(losses[5:])], rel=1e-6)
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.*")).parent))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("train_loss_step")]
    assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses)]
    first, _, other = ([metrics.get("train_loss_step") for metrics in result["metrics"]] for result in results)
    assert first == pytest.approx(losses, rel=1e-6)
    assert results[0]["losses"] == pytest.approx(losses, rel=1e-6)  # the last stage returns the batch's own loss
    assert other == [None] * 4 + [first[4]] * 5 + [first[9]]


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_steps_that_are_logged_are_those_of_plain_lightning(strategy: str) -> None:
    trainer = {"logger": "list", "log_every_n_steps": 3, "max_epochs": 3, "accumulate_grad_batches": 2}
    run = Run(Net, strategy, trainer=trainer, val_samples=(8,))
    (result,), plain = ONE_PROCESS.run(2, fit, run), fit(replace(run, strategy="plain"))
    found, expected = (sorted((step, sorted(m)) for step, m in one["records"]) for one in (result, plain))
    assert found == expected
    assert set(result["logged"]) - {"epoch"} == set(plain["logged"])


def check_reductions(records: list[Any], run: Run, replicas: int) -> None:
    parts = [batches_of(run, 0, replicas=replicas, replica=replica) for replica in range(replicas)]
    for step, batches in enumerate(zip(*parts)):
        x = batches[0]["x"]  # as under DDP, the values of a step are those of the first replica
        metrics = {name: value for at, record in records if at == step for name, value in record.items()}
        assert metrics["count"] == len(x)
        assert metrics["highest"] == pytest.approx(float(x.max()))
        assert metrics["lowest"] == pytest.approx(float(x.min()))
        assert metrics["mean_step"] == pytest.approx(float(x.mean()), rel=1e-5)


def test_reductions_over_microbatches(pools: Pools) -> None:
    """Metrics are reduced over microbatches; those of the last batch have other sizes than the others."""
    run = Run(SumsAndExtremes, samples=SAMPLES, shuffle=True, options={"microbatches": 3}, trainer={"logger": "list"})
    check_reductions(ONE_PROCESS.run(3, fit, run)[0]["records"], run, 1)
    run = replace(run, options=run.options | {"data_parallel_size": 2}, samples=SAMPLES - 1, batch_size=4)
    check_reductions(pools.run(4, fit, run)[0]["records"], run, 2)


STAGES = 3


class LogsEverywhere(L.Callback):
    """Callback that logs numbers in every hook that may; they are averaged and do not depend on the model."""

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


class Computes(MetricNet):
    def on_train_epoch_end(self) -> None:
        self.log("train_root", self.train_mse.compute().sqrt())


@pytest.mark.filterwarnings("ignore")
def test_hooks_log_what_they_log_in_plain_lightning(pools: Pools) -> None:
    """All ranks have the metrics of plain Lightning, although only the last stage has losses."""
    run = Run(Computes, "sync", {"microbatches": STAGES}, val_samples=(16,), callbacks=((LogsEverywhere, {}),))
    run = replace(run, samples=36, trainer={"max_epochs": 2, "logger": "list"})
    plain, results = fit(replace(run, strategy="plain", options={})), pools.run(STAGES, fit, run)
    assert {"train_root", "val_once", "epoch_end", "by_attribute"} <= plain["callback_metrics"].keys()
    for result in results:
        assert result["callback_metrics"] == pytest.approx(plain["callback_metrics"], rel=1e-5)
    steps = [metrics["batch_end_step"] for _, metrics in results[0]["records"] if "batch_end_step" in metrics]
    assert steps == [0.0, 1.0, 4.0, 9.0, 16.0] * 2, "a value was lost, or logged twice"


class LogsItsLoss(L.Callback):
    """Callback that logs the loss of a batch, which only the last stage has."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            module.log("found", outputs["loss"])


def test_a_checkpoint_that_monitors_what_one_stage_logs_is_the_same_on_all(pools: Pools, tmp_path: Path) -> None:
    best = (ModelCheckpoint, {"dirpath": str(tmp_path), "monitor": "found", "every_n_train_steps": 2})
    run = Run(Net, options={"microbatches": STAGES}, callbacks=((LogsItsLoss, {}), best), samples=64)
    results = pools.run(STAGES, fit, replace(run, trainer={"enable_checkpointing": True}), timeout=20.0)
    (path,) = {result["best"] for result in results}
    assert Path(path).is_file()


class SkipsRest(Net):
    """Model that ends the first epoch after two of five batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self.current_epoch == 0 else None


def test_an_epoch_that_is_cut_short_loses_no_update_and_no_metric() -> None:
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
    """Model that returns predictions with its loss, and records the shapes of the outputs that its hook gets."""

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
