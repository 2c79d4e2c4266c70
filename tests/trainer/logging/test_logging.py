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
from torch.nn import functional as F

from tests.helpers.modules import ManyNames, MetricNet, SumsAndExtremes
from tests.helpers.oracle import batches_of, joined_weights, mini_batches_of, oracle, plain_module
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, fit

SAMPLES, SIZES = 37, (8, 8, 8, 8, 5)


def weighted(losses: list[float]) -> float:
    return sum(loss * size for loss, size in zip(losses, SIZES)) / SAMPLES


@pytest.mark.parametrize("strategy", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_files_hold_every_step_once(pools: Pools, strategy: str, tmp_path: Path) -> None:
    run = Run(
        Net, strategy, samples=SAMPLES, trainer={"logger": "files", "default_root_dir": str(tmp_path), "max_epochs": 2}
    )
    pools.run(3, fit, run)
    _, losses = oracle(run, 3, list(mini_batches_of(run, 2)))
    with next(tmp_path.glob("lightning_logs/version_*/metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    steps = [(int(row["step"]), float(row["train_loss_step"])) for row in rows if row["train_loss_step"]]
    assert [step for step, _ in steps] == list(range(10))
    assert [loss for _, loss in steps] == pytest.approx(losses, rel=1e-6)
    epochs = [float(row["train_loss_epoch"]) for row in rows if row["train_loss_epoch"]]
    assert epochs == pytest.approx([weighted(losses[:5]), weighted(losses[5:])], rel=1e-6)
    assert [row["epoch"] for row in rows if row["train_loss_step"]] == ["0"] * 5 + ["1"] * 5
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.*")).parent))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train_loss_step")] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses)
    ]
    assert [e.value for e in events.Scalars("train_loss_epoch")] == pytest.approx(epochs, rel=1e-6)


@pytest.mark.parametrize(
    ("every", "accumulate"),
    [(3, 2), *(pytest.param(*both, marks=pytest.mark.slow) for both in ((1, 2), (3, 1), (1, 1)))],
)
def test_steps_that_are_logged_are_those_of_plain_lightning(pools: Pools, every: int, accumulate: int) -> None:
    trainer = {"logger": "list", "log_every_n_steps": every, "max_epochs": 3, "accumulate_grad_batches": accumulate}
    run = Run(Net, trainer=trainer, val_samples=(8,))
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    names = [(step, sorted(metrics)) for step, metrics in plain["records"]]
    for strategy in ("async", "sync"):
        result = pools.run(2, fit, replace(run, strategy=strategy))[0]
        assert sorted((step, sorted(metrics)) for step, metrics in result["records"]) == sorted(names)
        assert set(result["logged"]) - {"epoch"} == set(plain["logged"])


@pytest.mark.parametrize(
    ("module", "stages", "replicas"),
    [
        pytest.param(MetricNet, 3, 1, marks=pytest.mark.slow),
        (SumsAndExtremes, 3, 1),
        pytest.param(Net, 2, 2, marks=pytest.mark.slow),
        (MetricNet, 2, 2),
        pytest.param(ManyNames, 2, 2, marks=pytest.mark.slow),
        pytest.param(Net, 3, 1, marks=pytest.mark.slow),
        pytest.param(ManyNames, 3, 1, marks=pytest.mark.slow),
        pytest.param(SumsAndExtremes, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_know_the_same(pools: Pools, module: Any, stages: int, replicas: int) -> None:
    options = {"data_parallel_size": replicas, "microbatches": 4}
    run = Run(module, options=options, samples=44, val_samples=(13, 6), shuffle=True, batch_size=8 // replicas)
    run = replace(run, trainer={"max_epochs": 2, "val_check_interval": 2})
    results = pools.run(stages * replicas, fit, run)
    assert results[0]["callback_metrics"]
    for result in results[1:]:
        assert result["callback_metrics"] == results[0]["callback_metrics"]
        assert result["metrics"][1::2] == results[0]["metrics"][1::2]  # before a validation
    assert not any(math.isnan(value) for value in results[0]["callback_metrics"].values())
    assert any("train_loss" in name for name in results[0]["metrics"][1])


def test_rank_0_has_a_batch_s_own_metrics_and_others_those_of_the_last_drain(pools: Pools) -> None:
    run = Run(Net, trainer={"max_epochs": 2})
    results = pools.run(2, fit, run)
    _, losses = oracle(run, 2, list(mini_batches_of(run, 2)))
    first, other = ([metrics.get("train_loss_step") for metrics in result["metrics"]] for result in results)
    assert first == pytest.approx(losses, rel=1e-6)
    last = [pytest.approx(losses[4], rel=1e-6), pytest.approx(losses[9], rel=1e-6)]  # of an epoch
    assert other == [None] * 4 + [last[0]] * 5 + [last[1]]
    assert results[0]["losses"] == pytest.approx(losses, rel=1e-6)  # what the last stage returns is the batch's own


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_validation_loss_is_that_of_a_plain_evaluation(pools: Pools, stages: int) -> None:
    run = Run(Net, val_samples=(13, 6), dropout=0.2)
    results = pools.run(stages, fit, run)
    module = plain_module(run, joined_weights(results, stages))
    for seed, count in enumerate(run.val_samples, 1):
        data = Samples(count, seed)
        with torch.no_grad():
            expected = float(F.mse_loss(module.model(data.x), data.y))
        for result in results:
            assert result["callback_metrics"][f"val_loss/dataloader_idx_{seed - 1}"] == pytest.approx(
                expected, rel=1e-5
            )


@pytest.mark.parametrize(("stages", "replicas"), [(3, 1), (2, 2)])
def test_reductions_over_microbatches(pools: Pools, stages: int, replicas: int) -> None:
    options = {"data_parallel_size": replicas, "microbatches": 3}
    run = Run(SumsAndExtremes, options=options, samples=SAMPLES - 1, batch_size=8 // replicas, shuffle=True)
    run = replace(run, trainer={"logger": "list", "max_epochs": 1})
    records = pools.run(stages * replicas, fit, run)[0]["records"]
    parts = [batches_of(run, 0, replicas=replicas, replica=replica) for replica in range(replicas)]
    for step, batches in enumerate(zip(*parts)):
        x = batches[0]["x"]  # as under DDP, the values of a step are those of the first replica
        metrics = {name: value for at, record in records if at == step for name, value in record.items()}
        assert metrics["count"] == len(x)
        assert metrics["highest"] == pytest.approx(float(x.max()))
        assert metrics["lowest"] == pytest.approx(float(x.min()))
        assert metrics["mean_step"] == pytest.approx(float(x.mean()), rel=1e-5)


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2)])
def test_torchmetrics_objects(pools: Pools, stages: int, replicas: int) -> None:
    """Logged in training and validation; the epoch's value is that over all samples of all replicas."""
    options = {"data_parallel_size": replicas, "microbatches": 4}
    run = Run(MetricNet, options=options, samples=36, val_samples=(12,), shuffle=True, batch_size=8 // replicas)
    run = replace(run, trainer={"logger": "list", "max_epochs": 2})
    results = pools.run(stages * replicas, fit, run)
    for result in results:
        metrics = result["callback_metrics"]
        assert metrics["val_mse"] == pytest.approx(metrics["val_loss"], rel=1e-4)
        assert metrics["train_mse"] == pytest.approx(metrics["train_loss_epoch"], rel=1e-4)
        assert metrics["by_attribute"] == pytest.approx(metrics["train_loss_epoch"], rel=1e-4)
    epochs = [metrics["train_mse"] for _, metrics in results[0]["records"] if "train_mse" in metrics]
    assert len(epochs) == 2
    assert epochs[0] != epochs[1]


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


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (3, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_name_that_only_some_batches_log(pools: Pools, stages: int, replicas: int) -> None:
    """Also where one replica has such samples and the other has not: the mean over those that logged it."""
    options = {"microbatches": 3, "data_parallel_size": replicas}
    run = Run(LogsSometimes, options=options, batch_size=3, samples=36, shuffle=True, trainer={"logger": "list"})
    results = pools.run(stages * replicas, fit, run)
    data, module = Samples(36), LogsSometimes(run)
    with torch.no_grad():
        losses = (module.model(data.x) - data.y) ** 2
    means = {name: float(losses[chosen].mean()) for name, chosen in chosen_of(data.y).items() if chosen.any()}
    assert set(means) == {"high", "low"}
    for result in results:
        metrics = result["callback_metrics"]
        assert {name: metrics[f"{name}_epoch"] for name in means} == pytest.approx(means, rel=1e-5)
        assert not any("never" in name for name in metrics)
    counts = [sum(bool(chosen_of(y)[name].any()) for y in data.y.split(3)) for name in means]
    assert all(0 < count < 12 for count in counts), "no batch without such a name: the test tests nothing"
