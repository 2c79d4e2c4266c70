"""``Trainer.fit`` over the stages of a pipeline ends with the oracle's weights, bit for bit on one replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.optim.lr_scheduler import LambdaLR

from lightning_asyncpp.trainer.gpt_module import learning_rate_factor
from tests.helpers.modules import CarryingNet, FrozenStatisticsNet, InPlaceNet, SummingNet, small_gpt
from tests.helpers.oracle import assert_equal_weights, batches_of, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Net, Run, delayed, fit, staged, train
from tests.trainer.idioms.optimization import Backbone

tied_gpt = partial(small_gpt, tie_embeddings=True)
TWO_EPOCHS = {"max_epochs": 2}
CLIPPED = {"gradient_clip_val": 0.4}
MUON = Run(Net, trainer=CLIPPED, optimizer="muon", error_feedback=True, scheduler="decay-step", dropout=0.2)
VALIDATED = {"max_epochs": 2, "val_check_interval": 2, "enable_checkpointing": True}
IN_ONE_PROCESS: dict[str, tuple[Run, int]] = {
    "muon-feedback-clipped": (MUON, 3),
    "muon-feedback-sync": (replace(MUON, strategy="sync"), 4),  # without a delay, error feedback corrects nothing
    "an odd number accumulated": (
        replace(MUON, dropout=0.0, samples=37, trainer={**CLIPPED, **TWO_EPOCHS, "accumulate_grad_batches": 2}), 3,
    ),
    "in evaluation mode when it drains": (
        Run(FrozenStatisticsNet, val_samples=(10,),
            trainer={**TWO_EPOCHS, "val_check_interval": 2, "num_sanity_val_steps": 2}), 2,
    ),
    "max_steps": (Run(Net, samples=45, shuffle=True, trainer={"max_steps": 3, "max_epochs": -1}), 2),
    "scheduled by epoch": (Run(Net, scheduler="decay-epoch", trainer={"max_epochs": 3}, samples=24), 2),
    "layers that change their input": (Run(InPlaceNet, options={"microbatches": 3}), 3),
    "a dictionary over the cuts": (Run(CarryingNet, samples=29, optimizer="muon", error_feedback=True), 3),
    "sums": (Run(SummingNet, samples=39), 3),
}  # fmt: skip
IN_PROCESSES: dict[str, tuple[Run, int]] = {
    "adamw, an uneven cut": (
        Run(Net, options={"microbatches": 4, "partition": [6, 2, 1]}, trainer=TWO_EPOCHS, scheduler="decay-step"), 3,
    ),
    "a synchronous start": (Run(Net, options={"microbatches": 4, "synchronous_start": 3}, error_feedback=True), 2),
    "validated and saved in mid-epoch": (
        Run(Net, samples=52, val_samples=(10,), dropout=0.3, scheduler="decay-step", shuffle=True, trainer=VALIDATED),
        3,
    ),
    "gpt": (Run(tied_gpt, options={"microbatches": 3}, trainer=TWO_EPOCHS, dataset="tokens", samples=36), 3),
}  # fmt: skip


def after_update(run: Run) -> Callable[[Any], Callable[[], None]] | None:
    """Return the oracle's ``after_update`` if it cannot step the run's learning rate schedule itself, or None."""
    if run.module is tied_gpt:
        factor = learning_rate_factor(small_gpt(run))
    elif run.scheduler == "decay-epoch":
        factor = lambda update: 1.0 / (1 + 0.3 * (update * run.batch_size // run.samples))  # noqa: E731
    else:
        return None
    return lambda optimizer: LambdaLR(optimizer, factor).step


def assert_is_the_oracles(run: Run, stages: int, weights: dict[str, np.ndarray], result: dict[str, Any]) -> None:
    """Check weights and logged losses; of accumulated batches, Lightning logs the last one's loss, which is ignored."""
    epochs, accumulate = (run.trainer.get(name, 1) for name in ("max_epochs", "accumulate_grad_batches"))
    batches = list(mini_batches_of(run, max(epochs, 1), accumulate=accumulate))[: run.trainer.get("max_steps")]
    microbatches, max_norm = run.options.get("microbatches", stages), run.trainer.get("gradient_clip_val")
    start = run.options.get("synchronous_start", 0)
    expected, losses = oracle(run, microbatches, batches, max_norm, after_update(run), start)
    assert_equal_weights(weights, expected)
    name = "train_loss" if run.module is tied_gpt else "train_loss_step"
    logged = [(step, metrics[name]) for step, metrics in result["records"] if name in metrics]
    assert [step for step, _ in logged] == list(range(len(losses)))
    assert result["global_step"] == len(losses)
    if accumulate == 1:
        assert [loss for _, loss in logged] == pytest.approx(losses, rel=1e-6)


def over_processes(pools: Pools, run: Run, stages: int) -> list[dict[str, Any]]:
    return pools.run(stages, fit, replace(run, trainer=run.trainer | {"logger": "list"}))


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_stages_in_one_process(name: str) -> None:
    run, stages = IN_ONE_PROCESS[name]
    result = train(staged(run, stages))
    assert_is_the_oracles(run, stages, result["weights"], result)


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_stages_in_processes(pools: Pools, tmp_path: Path, name: str) -> None:
    """Stages train as the oracle; validations and checkpoints drain the pipeline, but do not change the trajectory."""
    run, stages = IN_PROCESSES[name]
    if "enable_checkpointing" in run.trainer:
        run = replace(run, callbacks=(saving(tmp_path, every_n_train_steps=3),))
    results = over_processes(pools, run, stages)
    weights = joined_weights(results, stages)
    if run.module is tied_gpt:
        assert np.array_equal(weights.pop("model.head.weight"), weights["model.embedding.token.weight"])
    assert_is_the_oracles(run, stages, weights, results[0])
    assert len({(result["global_step"], *result["rates"]) for result in results}) == 1
    assert len(list(tmp_path.glob("*.ckpt"))) == (4 if "enable_checkpointing" in run.trainer else 0)
    assert all(("val_loss" in result["callback_metrics"]) == bool(run.val_samples) for result in results)


def test_two_replicas_of_two_stages(pools: Pools) -> None:
    """Replicas' batches count as further microbatches of the same mini-batch; results are equal up to rounding."""
    run = Run(Net, options={"data_parallel_size": 2, "microbatches": 3}, shuffle=True, scheduler="decay-step")
    run = replace(run, trainer={"max_epochs": 2, "gradient_clip_val": 0.5, "logger": "list"}, samples=44, batch_size=4)
    results = pools.run(4, fit, run)
    batches = [
        list(pair)
        for epoch in range(2)
        for pair in zip(*(batches_of(run, epoch, replicas=2, replica=replica) for replica in range(2)))
    ]
    weights, losses = oracle(run, 3, batches, max_norm=0.5)
    for first in (0, 2):
        joined = joined_weights(results[first:], 2)
        for name, weight in weights.items():
            np.testing.assert_allclose(joined[name], weight, rtol=2e-3, atol=1e-5, err_msg=name)
    epochs = [m["train_loss_epoch"] for _, m in results[0]["records"] if "train_loss_epoch" in m]
    sizes = [8, 8, 8, 8, 8, 4]
    assert epochs == pytest.approx([np.average(losses[at : at + 6], weights=sizes) for at in (0, 6)], rel=1e-3)
    assert all(result["callback_metrics"] == results[0]["callback_metrics"] for result in results)


def test_a_module_that_nothing_can_cut_is_one_stage() -> None:
    """A module that cannot be cut trains as one stage; a delay of 1 affects its second update and later ones."""
    run = Run(Backbone, scheduler="decay-step")
    plain = train(replace(run, strategy="plain"))["weights"]
    whole, late = (train(delayed(run, microbatches=1, delay=delay))["weights"] for delay in (0, 1))
    for name, weight in plain.items():
        np.testing.assert_allclose(whole[name], weight, rtol=2e-6, atol=2e-7, err_msg=name)
        assert not np.allclose(late[name], weight, rtol=1e-3)
