"""What people use with a Trainer goes on working: evaluation, precision, callbacks that decide on metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn

from tests.helpers.cases import DIM
from tests.helpers.modules import BatchNormNet, LogsAtTheEnd, NormFirstNet, StopsOnOneRank
from tests.helpers.oracle import (
    assert_equal_weights,
    batches_of,
    joined_parts,
    joined_weights,
    mini_batches_of,
    oracle,
    plain_module,
)
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, arrays, evaluate, fit

# -- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", "float32"),
        pytest.param("bf16-true", "bfloat16", marks=pytest.mark.slow),
        pytest.param("32-true", "float32", marks=pytest.mark.slow),
        pytest.param("64-true", "float64", marks=pytest.mark.slow),
    ],
)
def test_precision(pools: Pools, precision: str, dtype: str) -> None:
    """Trains in the dtype that was asked for, and bitwise alike for every number of stages."""
    run = Run(Net, options={"microbatches": 3}, optimizer="adamw", dropout=0.1)
    run = replace(run, trainer={"precision": precision, "max_epochs": 8, "gradient_clip_val": 1.0})
    (one,) = pools.run(1, fit, run)
    two = pools.run(2, fit, run)
    assert {name for result in two for name in result["dtypes"].values()} == {dtype}
    assert two[0]["losses"][-1] < 0.7 * two[0]["losses"][0]
    assert_equal_weights(joined_weights(two, 2), one["weights"])


# -- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 3])
def test_validate_and_test(pools: Pools, stages: int) -> None:
    run = Run(Net, val_samples=(13, 6))
    results = pools.run(stages, evaluate, run, "validate")
    (plain,) = pools.run(1, evaluate, replace(run, strategy="plain"), "validate")
    for result in results:
        assert [list(of_loader) for of_loader in result["returned"]] == [
            list(of_loader) for of_loader in plain["returned"]
        ]
        for mine, theirs in zip(result["returned"], plain["returned"]):
            assert mine == pytest.approx(theirs, rel=1e-5)
    run = replace(run, val_samples=(13,))
    (expected,) = pools.run(1, evaluate, replace(run, strategy="plain"), "test")
    for result in pools.run(stages, evaluate, run, "test"):
        assert result["returned"][0] == pytest.approx(expected["returned"][0], rel=1e-5)


def test_predict(pools: Pools) -> None:
    """The last stage, rank 0, has the outputs; the others have nothing."""
    run = Run(Net, val_samples=(13,))
    results = pools.run(3, evaluate, run, "predict")
    (plain,) = pools.run(1, evaluate, replace(run, strategy="plain"), "predict")
    assert [len(batch) for batch in results[0]["returned"]] == [8, 5]
    for mine, theirs in zip(results[0]["returned"], plain["returned"]):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    for result in results[1:]:
        assert all(batch is None for batch in result["returned"] or [])


def test_sanity_check_before_training(pools: Pools) -> None:
    """It changes neither weights nor metrics, and consumes no random numbers of training."""
    run = Run(Net, val_samples=(13,), dropout=0.3, trainer={"num_sanity_val_steps": 2})
    results = pools.run(2, fit, run)
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, list(mini_batches_of(run)))[0])
    assert "val_loss" not in results[0]["metrics"][0]


@pytest.mark.parametrize(
    "trainer",
    [{"fast_dev_run": 2}, {"overfit_batches": 2, "max_epochs": 2}, {"barebones": True, "log_every_n_steps": 0}],
)
def test_ways_to_run_a_little(pools: Pools, trainer: dict[str, Any]) -> None:
    run = Run(Net, trainer=trainer, val_samples=(9,))
    results = pools.run(2, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    assert [result["steps"] for result in results] == [plain["steps"]] * 2


# -- callbacks that decide on metrics -----------------------------------------------------------------------------


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def test_model_checkpoint_on_the_training_loss(pools: Pools, tmp_path: Path) -> None:
    """It keeps the checkpoints of the best steps, by the loss of the very step that it saves after."""
    saving = {
        "dirpath": tmp_path,
        "monitor": "train_loss_step",
        "every_n_train_steps": 2,
        "save_top_k": 2,
        "filename": "{step}",
    }
    run = Run(Net, callbacks=((ModelCheckpoint, saving),), trainer={"max_epochs": 2, "enable_checkpointing": True})
    results = pools.run(2, fit, run)
    _, losses = oracle(run, 2, list(mini_batches_of(run, 2)))
    best = sorted(range(1, 10, 2), key=lambda step: losses[step])[:2]
    assert kept(tmp_path) == sorted(f"step={step + 1}.ckpt" for step in best)
    assert {result["best"] for result in results} == {str(tmp_path / f"step={best[0] + 1}.ckpt")}


def test_model_checkpoint_on_the_validation_loss(pools: Pools, tmp_path: Path) -> None:
    saving = {"dirpath": tmp_path, "monitor": "val_loss", "save_top_k": 1, "save_last": True, "filename": "{epoch}"}
    run = Run(Net, callbacks=((ModelCheckpoint, saving),), val_samples=(13,), optimizer="sgd")
    run = replace(run, trainer={"max_epochs": 3, "enable_checkpointing": True, "logger": "list"})
    results = pools.run(3, fit, run)
    losses = [metrics["val_loss"] for _, metrics in results[0]["records"] if "val_loss" in metrics]
    assert kept(tmp_path) == [f"epoch={losses.index(min(losses))}.ckpt", "last.ckpt"]
    assert len({result["best"] for result in results}) == 1


@pytest.mark.parametrize("monitor", ["val_loss", "train_loss_epoch"])
def test_early_stopping(pools: Pools, monitor: str) -> None:
    """All ranks stop after the same epoch, and where a plain run with the same losses would."""
    stopping = {"monitor": monitor, "patience": 0, "min_delta": 10.0}
    run = Run(Net, callbacks=((EarlyStopping, stopping),), val_samples=(13,), trainer={"max_epochs": 9})
    results = pools.run(2, fit, run)
    assert [result["epoch"] for result in results] == [2, 2]
    assert {result["global_step"] for result in results} == {10}


def test_early_stopping_by_step(pools: Pools) -> None:
    """``check_on_train_epoch_end=False`` without validation is Lightning's; here a validation in mid-epoch decides."""
    stopping = {"monitor": "val_loss", "patience": 0, "min_delta": 10.0}
    run = Run(Net, callbacks=((EarlyStopping, stopping),), val_samples=(13,))
    run = replace(run, trainer={"max_epochs": 3, "val_check_interval": 2})
    results = pools.run(3, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    assert {result["global_step"] for result in results} == {plain["global_step"]}


@pytest.mark.parametrize(
    ("rank", "hook"), [(0, "on_train_batch_end"), (1, "on_train_batch_end"), (0, "on_train_batch_start")]
)
def test_a_callback_that_stops_on_one_rank_only(pools: Pools, rank: int, hook: str) -> None:
    """The wish travels with the control message: all ranks end after a common batch."""
    stop = (StopsOnOneRank, {"rank": rank, "batch": 3, "hook": hook})
    run = Run(Net, callbacks=(stop,), samples=400, trainer={"max_epochs": 2}, val_samples=(13,))
    results = pools.run(2, fit, run)
    assert len({result["global_step"] for result in results}) == 1
    assert 4 <= results[0]["global_step"] <= 7


def test_learning_rate_monitor(pools: Pools) -> None:
    """Logs the rate that the batch's update takes, as in a plain run."""
    monitor = (LearningRateMonitor, {"logging_interval": "step"})
    run = Run(Net, callbacks=(monitor,), scheduler="decay-step", trainer={"logger": "list"})
    results = pools.run(2, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    rates = [record for record in results[0]["records"] if "lr-AdamW" in record[1]]
    assert rates == [record for record in plain["records"] if "lr-AdamW" in record[1]]
    assert len(rates) == 5


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param("plateau-epoch-val_loss", marks=pytest.mark.slow),
        "plateau-step-train_loss",
        "plateau-epoch-train_loss_epoch",
    ],
)
def test_reduce_on_plateau(pools: Pools, scheduler: str) -> None:
    """All ranks lower the rate at the same step; the synchronous pipeline where a plain run does."""
    run = Run(Net, scheduler=scheduler, val_samples=(13,), optimizer="sgd", trainer={"max_epochs": 4})
    results = pools.run(2, fit, run)
    assert results[0]["rates"] == results[1]["rates"]
    assert results[0]["rates"][-1] < results[0]["rates"][0]
    synchronous = pools.run(2, fit, replace(run, strategy="sync"))
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    assert [result["rates"] for result in synchronous] == [plain["rates"]] * 2


def test_a_rate_follows_what_a_callback_logged_in_the_same_batch(pools: Pools) -> None:
    run = Run(Net, scheduler="plateau-step-late", optimizer="sgd", callbacks=((LogsAtTheEnd, {}),))
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    for strategy in ("async", "sync"):
        assert [result["rates"] for result in pools.run(2, fit, replace(run, strategy=strategy))] == [
            plain["rates"]
        ] * 2


# -- BatchNorm ----------------------------------------------------------------------------------------------------


def test_batch_norm_counts_microbatches(pools: Pools) -> None:
    """Statistics are those of microbatches, and of every forward; buffers have one version only."""
    run = Run(BatchNormNet, options={"microbatches": 2}, trainer={"max_epochs": 2}, val_samples=(8,))
    results = pools.run(2, fit, run)
    (one,) = pools.run(1, fit, run)
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, list(mini_batches_of(run, 2)))[0])
    buffers = joined_parts([result["buffers"] for result in results])
    assert_equal_weights(buffers, one["buffers"])
    counts = [array for name, array in buffers.items() if name.endswith("num_batches_tracked")]
    assert [int(count) for count in counts] == [20, 20]


def test_every_replica_has_running_statistics_of_its_own(pools: Pools) -> None:
    """Those of its own microbatches, in their order; the whole model gets those of the first replica."""
    options = {"data_parallel_size": 2, "microbatches": 3}
    run = Run(NormFirstNet, options=options, shuffle=True, samples=36, batch_size=6)
    results = pools.run(4, fit, run)
    for replica, rank in enumerate((1, 3)):  # the first stages
        norm = nn.BatchNorm1d(DIM)
        for batch in batches_of(run, 0, replicas=2, replica=replica):
            for x in batch["x"].tensor_split(3):
                norm(x)
        buffers = {name.removeprefix("model.0."): array for name, array in results[rank]["buffers"].items()}
        assert_equal_weights(buffers, arrays(dict(norm.named_buffers())))
    first, second = (results[rank]["buffers"]["model.0.running_mean"] for rank in (1, 3))
    assert not np.array_equal(first, second)
    whole = {name: array for name, array in results[0]["full_at_end"].items() if name in results[1]["buffers"]}
    assert_equal_weights(whole, results[1]["buffers"])
    assert_equal_weights(joined_weights(results, 2), joined_weights(results[2:], 2))


def test_plain_module_takes_the_weights_of_all_stages(pools: Pools) -> None:
    """Gathered at the end of training, and again when the Trainer is done."""
    run = Run(Net, trainer={"max_epochs": 2})
    results = pools.run(3, fit, run)
    weights = joined_weights(results, 3)
    for name in ("full_at_end", "full_afterwards"):
        assert_equal_weights(results[0][name], weights)
        assert all(result[name].keys() == result["weights"].keys() for result in results[1:])
    module = plain_module(run, results[0]["full_at_end"])
    x = Samples(9, 4).x
    expected = pools.run(3, evaluate, replace(run, val_samples=(), samples=9), "predict", weights)[0]["returned"]
    with torch.no_grad():
        np.testing.assert_allclose(module.model(batches_of(replace(run, samples=9), 0)[0]["x"]), expected[0], rtol=1e-5)
        assert torch.isfinite(module.model(x)).all()
