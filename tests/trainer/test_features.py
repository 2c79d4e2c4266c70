"""What people use with a Trainer goes on working: evaluation, precision, callbacks that decide on metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn

from tests.helpers.cases import DIM
from tests.helpers.modules import BatchNormNet, LogsAtTheEnd, MetricNet, StopsOnOneRank
from tests.helpers.oracle import assert_equal_weights, batches_of, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, evaluate, fit, staged, train


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", "bfloat16"), ("64-true", "float64")])
def test_precision(precision: str, dtype: str) -> None:
    """Trains in the dtype that was asked for, and bitwise alike for every number of stages."""
    trainer = {"precision": precision, "max_epochs": 8, "gradient_clip_val": 1.0}
    run = Run(Net, options={"microbatches": 3}, dropout=0.1, trainer=trainer)
    one, two = (train(staged(run, stages)) for stages in (1, 2))
    assert set(two["dtypes"].values()) == {dtype}
    assert two["losses"][-1] < 0.7 * two["losses"][0]
    assert_equal_weights(two["weights"], one["weights"])


def test_validate_test_and_predict(pools: Pools) -> None:
    """All ranks have the metrics; the last stage, rank 0, has the outputs, the others have nothing."""
    run = Run(Net, val_samples=(13,))
    for what, validated in (("validate", replace(run, val_samples=(13, 6))), ("test", run)):
        expected = evaluate(replace(validated, strategy="plain"), what)["returned"]
        for result in pools.run(3, evaluate, validated, what):
            assert [list(metrics) for metrics in result["returned"]] == [list(metrics) for metrics in expected]
            for mine, theirs in zip(result["returned"], expected):
                assert mine == pytest.approx(theirs, rel=1e-5)
    first, *others = pools.run(3, evaluate, run, "predict")
    for mine, theirs in zip(first["returned"], evaluate(replace(run, strategy="plain"), "predict")["returned"]):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert all(batch is None for result in others for batch in result["returned"] or [])


def test_a_check_before_training_consumes_no_random_numbers_of_it() -> None:
    run = Run(Net, val_samples=(13,), dropout=0.3, trainer={"num_sanity_val_steps": 2})
    result = train(staged(run, 2))
    assert_equal_weights(result["weights"], oracle(run, 2, list(mini_batches_of(run)))[0])
    assert "val_loss" not in result["metrics"][0]


def test_metrics_have_the_names_of_plain_lightning() -> None:
    plain, one = (train(run) for run in (Run(MetricNet, "plain"), staged(Run(MetricNet), 1)))
    assert sorted(plain["callback_metrics"]) == sorted(one["callback_metrics"])
    assert [sorted(metrics) for _, metrics in plain["records"]] == [sorted(metrics) for _, metrics in one["records"]]


# -- callbacks that decide on metrics -----------------------------------------------------------------------------


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def test_model_checkpoint_on_the_training_loss(pools: Pools, tmp_path: Path) -> None:
    """It keeps the checkpoints of the best steps, on all ranks by the loss of the very step that it saves after."""
    saving = {"monitor": "train_loss_step", "every_n_train_steps": 2, "save_top_k": 2, "filename": "{step}"}
    callback = (ModelCheckpoint, {"dirpath": tmp_path, **saving})
    run = Run(Net, callbacks=(callback,), trainer={"max_epochs": 2, "enable_checkpointing": True})
    results = pools.run(2, fit, run)
    _, losses = oracle(run, 2, list(mini_batches_of(run, 2)))
    best = sorted(range(1, 10, 2), key=lambda step: losses[step])[:2]
    assert kept(tmp_path) == sorted(f"step={step + 1}.ckpt" for step in best)
    assert {result["best"] for result in results} == {str(tmp_path / f"step={best[0] + 1}.ckpt")}


def test_ranks_keep_the_same_checkpoints_and_stop_together(pools: Pools, tmp_path: Path) -> None:
    """By the loss of validations in mid-epoch."""
    saving = {"dirpath": tmp_path, "monitor": "val_loss", "save_top_k": 1, "save_last": True, "filename": "{step}"}
    stopping = {"monitor": "val_loss", "patience": 2, "min_delta": 10.0}
    run = Run(Net, callbacks=((ModelCheckpoint, saving), (EarlyStopping, stopping)), val_samples=(13,), optimizer="sgd")
    run = replace(run, trainer={"max_epochs": 9, "val_check_interval": 2, "enable_checkpointing": True})
    results = pools.run(3, fit, replace(run, trainer=run.trainer | {"logger": "list"}))
    losses = {step + 1: metrics["val_loss"] for step, metrics in results[0]["records"] if "val_loss" in metrics}
    assert kept(tmp_path) == ["last.ckpt", f"step={min(losses, key=losses.__getitem__)}.ckpt"]
    assert len({(result["best"], result["epoch"]) for result in results}) == 1
    plain = fit(replace(run, strategy="plain", callbacks=run.callbacks[1:]))
    assert {result["global_step"] for result in results} == {plain["global_step"]}


def test_a_callback_that_stops_on_one_rank_only(pools: Pools) -> None:
    """The wish travels with the control message: all ranks end after a common batch."""
    stop = (StopsOnOneRank, {"rank": 1, "batch": 3})
    results = pools.run(2, fit, Run(Net, callbacks=(stop,), samples=400, trainer={"max_epochs": 2}, val_samples=(13,)))
    assert len({result["global_step"] for result in results}) == 1
    assert 4 <= results[0]["global_step"] <= 7


def test_the_rate_is_that_of_the_batchs_update() -> None:
    monitor = (LearningRateMonitor, {"logging_interval": "step"})
    run = Run(Net, callbacks=(monitor,), scheduler="decay-step")
    found, plain = (
        [record for record in train(each)["records"] if "lr-AdamW" in record[1]]
        for each in (staged(run, 2), replace(run, strategy="plain"))
    )
    assert len(found) == 5
    assert found == plain


@pytest.mark.parametrize("scheduler", ["plateau-step-late", "plateau-epoch-train_loss_epoch"])
def test_ranks_lower_the_rate_on_a_plateau(pools: Pools, scheduler: str) -> None:
    """Where a plain run does; also by what a callback logged in the same batch."""
    run = Run(Net, scheduler=scheduler, optimizer="sgd", callbacks=((LogsAtTheEnd, {}),), trainer={"max_epochs": 4})
    run = replace(run, strategy="sync" if "epoch" in scheduler else "async")
    plain = fit(replace(run, strategy="plain"))["rates"]
    assert plain[-1] < plain[0]
    assert [result["rates"] for result in pools.run(2, fit, run)] == [plain] * 2


# -- BatchNorm ----------------------------------------------------------------------------------------------------


def test_batch_norm_counts_microbatches() -> None:
    """Statistics are those of microbatches, and of every forward; buffers have one version only."""
    run = Run(BatchNormNet, options={"microbatches": 2}, trainer={"max_epochs": 2}, val_samples=(8,))
    two, one = (train(staged(run, stages)) for stages in (2, 1))
    assert_equal_weights(two["weights"], oracle(run, 2, list(mini_batches_of(run, 2)))[0])
    assert_equal_weights(two["buffers"], one["buffers"])
    assert [int(n) for name, n in two["buffers"].items() if name.endswith("num_batches_tracked")] == [20, 20]


def test_every_replica_has_running_statistics_of_its_own(pools: Pools) -> None:
    """Those of its own microbatches, in their order; the whole model gets those of the first replica."""
    options: dict[str, Any] = {"data_parallel_size": 2, "microbatches": 3}
    run = Run(BatchNormNet, options=options, shuffle=True, samples=36, batch_size=6)
    results = pools.run(4, fit, run)
    for replica, rank in enumerate((1, 3)):  # the first stages
        norm = nn.BatchNorm1d(DIM)
        for batch in batches_of(run, 0, replicas=2, replica=replica):
            for x in batch["x"].tensor_split(3):
                norm(x)
        buffers = {name.removeprefix("model.0."): array for name, array in results[rank]["buffers"].items()}
        assert_equal_weights(buffers, arrays(dict(norm.named_buffers())))
    assert (results[1]["buffers"]["model.0.running_mean"] != results[3]["buffers"]["model.0.running_mean"]).any()
    whole = {name: array for name, array in results[0]["full_at_end"].items() if name in results[1]["buffers"]}
    assert_equal_weights(whole, results[1]["buffers"])
    assert_equal_weights(joined_weights(results, 2), joined_weights(results[2:], 2))
