"""Evaluation, precision, callbacks and schedulers that depend on metrics, and BatchNorm work in a pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.helpers.cases import DIM
from tests.helpers.modules import BatchNormNet, LogsAtTheEnd
from tests.helpers.oracle import assert_equal_weights, batches_of, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, evaluate, fit, staged, train


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", "bfloat16"), ("64-true", "float64")])
def test_stages_train_in_the_precision_that_was_asked_for(precision: str, dtype: str) -> None:
    trainer = {"precision": precision, "max_epochs": 2, "gradient_clip_val": 1.0}
    run = Run(Net, options={"microbatches": 3}, dropout=0.1, trainer=trainer)
    one, two = (train(staged(run, stages)) for stages in (1, 2))
    assert set(two["dtypes"].values()) == {dtype}
    assert_equal_weights(two["weights"], one["weights"])


@pytest.mark.parametrize("what", ["validate", "test"])
def test_all_ranks_have_the_metrics_of_an_evaluation(pools: Pools, what: str) -> None:
    run = Run(Net, val_samples=(13, 6) if what == "validate" else (13,))
    expected = evaluate(replace(run, strategy="plain"), what)["returned"]
    for result in pools.run(3, evaluate, run, what):
        assert [list(metrics) for metrics in result["returned"]] == [list(metrics) for metrics in expected]
        for mine, theirs in zip(result["returned"], expected):
            assert mine == pytest.approx(theirs, rel=1e-5)


def test_model_checkpoint_on_the_training_loss(pools: Pools, tmp_path: Path) -> None:
    """ModelCheckpoint keeps the best steps' checkpoints; all ranks judge a step by that step's own loss."""
    saving = {"monitor": "train_loss_step", "every_n_train_steps": 2, "save_top_k": 2, "filename": "{step}"}
    callback = (ModelCheckpoint, {"dirpath": tmp_path, **saving})
    run = Run(Net, callbacks=(callback,), trainer={"max_epochs": 2, "enable_checkpointing": True})
    results = pools.run(2, fit, run)
    _, losses = oracle(run, 2, list(mini_batches_of(run, 2)))
    best = sorted(range(1, 10, 2), key=lambda step: losses[step])[:2]
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {f"step={step + 1}.ckpt" for step in best}
    assert {result["best"] for result in results} == {str(tmp_path / f"step={best[0] + 1}.ckpt")}


@pytest.mark.parametrize("scheduler", ["plateau-step-late", "plateau-epoch-train_loss_epoch"])
def test_ranks_lower_the_rate_on_a_plateau(pools: Pools, scheduler: str) -> None:
    """Ranks lower the rate where a plain run does, also by a metric that a callback logs in the same batch."""
    run = Run(Net, scheduler=scheduler, optimizer="sgd", callbacks=((LogsAtTheEnd, {}),), trainer={"max_epochs": 4})
    run = replace(run, samples=24, strategy="sync" if "epoch" in scheduler else "async")
    plain = fit(replace(run, strategy="plain"))["rates"]
    assert plain[-1] < plain[0]
    assert [result["rates"] for result in pools.run(2, fit, run)] == [plain] * 2


def test_the_running_statistics_are_those_of_the_first_replica(pools: Pools) -> None:
    """They are those of its own microbatches, in order, and the other replicas get them at a save."""
    options: dict[str, Any] = {"data_parallel_size": 2, "microbatches": 3}
    run = Run(BatchNormNet, options=options, shuffle=True, samples=36, batch_size=6)
    results = pools.run(4, fit, run)
    norm = nn.BatchNorm1d(DIM)
    for batch in batches_of(run, 0, replicas=2, replica=0):
        for x in batch["x"].tensor_split(3):
            norm(x)
    for rank in (1, 3):  # the ranks of stage 0
        buffers = {name.removeprefix("model.0."): array for name, array in results[rank]["buffers"].items()}
        assert_equal_weights(buffers, arrays(dict(norm.named_buffers())))
    whole = {name: array for name, array in results[0]["full_at_end"].items() if name in results[1]["buffers"]}
    assert_equal_weights(whole, results[1]["buffers"])
    assert_equal_weights(joined_weights(results, 2), joined_weights(results[2:], 2))
