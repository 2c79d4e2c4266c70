"""Weights shared by two stages, losses that layers add, and buffers that they change: as in one process, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lightning_asyncpp.trainer.gpt_module import learning_rate_factor
from tests.helpers.cases import make_model
from tests.helpers.modules import small_gpt
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.random_layers import make
from tests.helpers.resumable import RESUMABLE_TRAINER, ResumableNet, saving
from tests.helpers.trainer import Net, Run, delayed, fit, train

FIRST = "model.0.weight"


class SharingNet(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = make_model(run.dropout, tied=True, routed=True)


class ResumableSharingNet(SharingNet):
    """The same, from a loader that goes on in mid-epoch."""

    train_dataloader = ResumableNet.train_dataloader


RUN = Run(
    SharingNet, "async", {"microbatches": 4}, optimizer="muon", error_feedback=True, dropout=0.2, samples=37,
    trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "logger": "list"},
)  # fmt: skip


def without_copies(weights: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights without the second copy of the shared one, which must equal the first."""
    copies = [name for name in weights if name not in expected]
    assert len(copies) <= 1
    assert all(np.array_equal(weights[name], weights[FIRST]) for name in copies)
    return {name: value for name, value in weights.items() if name not in copies}


def logged(records: list[Any], name: str) -> dict[int, float]:
    return {step: metrics[name] for step, metrics in records if name in metrics}


@pytest.mark.parametrize(
    ("stages", "strategy"),
    [
        (3, "async"),
        pytest.param(3, "sync", marks=pytest.mark.slow),
        *(pytest.param(few, "async", marks=pytest.mark.slow) for few in (1, 2)),
    ],
)
def test_the_pipeline_the_oracle_and_one_process_agree(pools: Pools, stages: int, strategy: str) -> None:
    run = replace(RUN, strategy=strategy)
    results = pools.run(stages, fit, run)
    weights, losses = oracle(run, 4, list(mini_batches_of(run, 2)), max_norm=0.4)
    assert_equal_weights(without_copies(joined_weights(results, stages), weights), weights)
    assert list(logged(results[0]["records"], "train_loss_step").values()) == pytest.approx(losses, rel=1e-6)
    emulated = train(delayed(run, delay=0 if strategy == "sync" else 1, microbatches=4))
    assert_equal_weights(emulated["weights"], weights)
    for name in ("samples", "busiest"):
        values = logged(results[0]["records"], name)
        assert values == logged(emulated["records"], name)
        assert list(values) == list(range(len(losses)))
    assert set(logged(results[0]["records"], "samples").values()) == {16.0, 10.0}  # two layers, the last batch of five


def test_the_copies_count_once_in_a_checkpoint_from_which_the_run_goes_on(pools: Pools, tmp_path: Path) -> None:
    run = replace(
        RUN, module=ResumableSharingNet, callbacks=(saving(tmp_path, every_n_train_steps=3),), trainer=RESUMABLE_TRAINER
    )
    whole = pools.run(3, fit, run)
    path = tmp_path / "step=3.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for state, prefix in ((checkpoint["state_dict"], "model."), (checkpoint["pipeline"]["older_weights"], "")):
        assert len({state[f"{prefix}{unit}.weight"].data_ptr() for unit in (0, 10)}) == 1
        assert f"{prefix}4.bias" in state
    resumed = pools.run(3, fit, replace(run, callbacks=(), ckpt_path=str(path)))
    assert_equal_weights(joined_weights(resumed, 3), joined_weights(whole, 3))
    for name in ("samples", "busiest"):
        rest = {step: value for step, value in logged(whole[0]["records"], name).items() if step >= 3}
        assert logged(resumed[0]["records"], name) == rest


def tied_gpt(run: Run) -> Any:
    return small_gpt(run, tie_embeddings=True)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_gpt_with_tied_embeddings(pools: Pools, stages: int) -> None:
    run = Run(tied_gpt, "async", {"microbatches": 3}, optimizer="muon", error_feedback=True, dataset="tokens")
    run = replace(run, trainer={"gradient_clip_val": 0.4})
    results = pools.run(stages, fit, run)

    def schedule(optimizer: Any) -> Callable[[], None]:
        return LambdaLR(optimizer, learning_rate_factor(tied_gpt(run))).step

    weights, _ = oracle(run, 3, list(mini_batches_of(run)), max_norm=0.4, after_update=schedule)
    joined = joined_weights(results, stages)
    assert np.array_equal(joined.pop("model.head.weight"), joined["model.embedding.token.weight"])
    assert_equal_weights(joined, weights)


class RepeatingNet(Net):
    """One dropout layer and one linear layer stand in several places, and a weight is shared."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layers = [("linear", "tensor"), ("same dropout", "tensor"), ("same dropout", "tensor"), ("as first", "tensor")]
        self.model = make(((*layers, *3 * [("same module", "tensor")])), run.dropout)


def test_one_process_sums_shared_gradients_over_all_batches_of_an_update() -> None:
    run = replace(RUN, module=RepeatingNet, trainer={"max_epochs": 1, "accumulate_grad_batches": 2})
    weights, _ = oracle(run, 4, list(mini_batches_of(run, accumulate=2)))
    assert_equal_weights(train(delayed(run, microbatches=4))["weights"], weights)
