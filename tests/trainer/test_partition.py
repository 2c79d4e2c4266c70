"""Under the Trainer, layers are distributed over stages by their measured times, and the log says so."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, loader, make_trainer, staged


def fit_and_describe(run: Run) -> dict[str, Any]:
    """Train, over processes with Lightning's model summary; return the partition, its description and the weights."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    trainer = make_trainer(run, enable_model_summary=run.strategy != "delayed")
    trainer.fit(module, loader(run))
    partition = trainer.strategy.session.partition
    weights = arrays(dict(module.named_parameters()))
    return {"counts": partition.counts, "log": partition.describe(), "weights": weights}


class Slow(nn.Linear):
    """Layer that is slow on one rank only, so that ranks would measure different times."""

    def __init__(self, outputs: int, slow_on: str) -> None:
        super().__init__(DIM, outputs)
        self.slow_on = slow_on

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02 if os.environ.get("RANK") == self.slow_on else 0)
        return super().forward(x)


class Disagreeing(Net):
    """Module whose ranks disagree about the times of its layers; its example passes through its own ``forward``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(3)
        self.model = nn.Sequential(Slow(DIM, "0"), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), Slow(1, "1"))
        self.example_input_array = torch.zeros(6, DIM // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.repeat(1, 2))


class WrongExample(Disagreeing):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.example_input_array = torch.zeros(6, DIM)


def test_layers_are_measured_on_rank_0_where_there_is_an_example(pools: Pools) -> None:
    """All ranks use the times of rank 0; if the example does not fit, they use the numbers of parameters."""
    run = Run(Disagreeing, samples=16)
    results = pools.run(2, fit_and_describe, run)
    for result in results:
        assert result["counts"] == (1, 3)
        assert "partition=[1, 3] by measured times" in result["log"]
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, list(mini_batches_of(run)))[0])
    assert "by numbers of parameters" in fit_and_describe(staged(replace(run, module=WrongExample), 2))["log"]
