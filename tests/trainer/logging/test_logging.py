"""What is logged, with the step that it belongs to, and that all ranks know the same."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.helpers.modules import MetricNet, SumsAndExtremes
from tests.helpers.oracle import batches_of, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS
from tests.helpers.trainer import Net, Run, Samples, fit

SAMPLES, SIZES = 37, (8, 8, 8, 8, 5)


def weighted(losses: list[float]) -> float:
    return sum(loss * size for loss, size in zip(losses, SIZES)) / SAMPLES


def test_files_hold_every_step_once(pools: Pools, tmp_path: Path) -> None:
    """On rank 0 callbacks see a batch's own metrics, on others those of the last drain."""
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
    assert results[0]["losses"] == pytest.approx(losses, rel=1e-6)  # the last stage returns the batch's own
    assert other == [None] * 4 + [first[4]] * 5 + [first[9]]


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_steps_that_are_logged_are_those_of_plain_lightning(strategy: str) -> None:
    trainer = {"logger": "list", "log_every_n_steps": 3, "max_epochs": 3, "accumulate_grad_batches": 2}
    run = Run(Net, strategy, trainer=trainer, val_samples=(8,))
    (result,), plain = ONE_PROCESS.run(2, fit, run), fit(replace(run, strategy="plain"))
    found, expected = (sorted((step, sorted(m)) for step, m in one["records"]) for one in (result, plain))
    assert found == expected
    assert set(result["logged"]) - {"epoch"} == set(plain["logged"])


def test_all_ranks_know_the_same(pools: Pools) -> None:
    """Also of torchmetrics objects, whose value of an epoch is that over all samples of all replicas."""
    options = {"data_parallel_size": 2, "microbatches": 4}
    run = Run(MetricNet, options=options, samples=36, val_samples=(12,), shuffle=True, batch_size=4)
    results = pools.run(4, fit, replace(run, trainer={"logger": "list", "max_epochs": 2}))
    for result in results:
        metrics = result["callback_metrics"]
        assert metrics == results[0]["callback_metrics"]
        assert not any(math.isnan(value) for value in metrics.values())
        assert metrics["val_mse"] == pytest.approx(metrics["val_loss"], rel=1e-4)
        assert metrics["train_mse"] == pytest.approx(metrics["train_loss_epoch"], rel=1e-4)
        assert metrics["by_attribute"] == pytest.approx(metrics["train_loss_epoch"], rel=1e-4)
    epochs = [metrics["train_mse"] for _, metrics in results[0]["records"] if "train_mse" in metrics]
    assert epochs[0] != epochs[1]


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
    """The last batch is cut into microbatches of other sizes than the others are."""
    run = Run(SumsAndExtremes, samples=SAMPLES, shuffle=True, options={"microbatches": 3}, trainer={"logger": "list"})
    check_reductions(ONE_PROCESS.run(3, fit, run)[0]["records"], run, 1)
    run = replace(run, options=run.options | {"data_parallel_size": 2}, samples=SAMPLES - 1, batch_size=4)
    check_reductions(pools.run(4, fit, run)[0]["records"], run, 2)


class LogsSometimes(Net):
    """Logs names only where the batch has such samples, and keeps its weights."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = (self.model(batch["x"]) - batch["y"]) ** 2
        for name, chosen in chosen_of(batch["y"]).items():
            if chosen.any():
                self.log(name, losses[chosen].mean(), on_step=True, on_epoch=True, batch_size=int(chosen.sum()))
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def chosen_of(y: Tensor) -> dict[str, Tensor]:
    return {"high": y > 1.3, "low": y < -1.3, "never": y > 100}


def test_a_name_that_only_some_batches_log(pools: Pools) -> None:
    """Also where one replica has such samples and the other has not: the mean over those that logged it."""
    run = Run(LogsSometimes, batch_size=3, samples=36, shuffle=True, trainer={"logger": "list"})
    data, module = Samples(36), LogsSometimes(run)
    with torch.no_grad():
        losses = (module.model(data.x) - data.y) ** 2
    means = {name: float(losses[chosen].mean()) for name, chosen in chosen_of(data.y).items() if chosen.any()}
    assert set(means) == {"high", "low"}
    run = replace(run, options={"microbatches": 3})
    replicas = replace(run, options=run.options | {"data_parallel_size": 2})
    for result in (*ONE_PROCESS.run(3, fit, run), *pools.run(2, fit, replicas)):
        metrics = result["callback_metrics"]
        assert {name: metrics[f"{name}_epoch"] for name in means} == pytest.approx(means, rel=1e-5)
        assert not any("never" in name for name in metrics)
    counts = [sum(bool(chosen_of(y)[name].any()) for y in data.y.split(3)) for name in means]
    assert all(0 < count < 12 for count in counts), "no batch without such a name: the test tests nothing"
