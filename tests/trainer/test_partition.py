"""Which layers each stage gets under the Trainer: what it goes by, what the log says, and what it keeps."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import PipelineTrace
from lightning_asyncpp.tools.recorded_run import read_run
from lightning_asyncpp.tools.trace_summary import summarise, table
from lightning_asyncpp.trainer.pipeline_module import PipelineModule
from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, loader, make_trainer, staged


def fit_and_describe(run: Run) -> dict[str, Any]:
    """Train with the summary that Lightning prints by default over processes; what was chosen, and the weights."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    trainer = make_trainer(run, enable_model_summary=run.strategy != "delayed")
    trainer.fit(module, loader(run))
    partition = trainer.strategy.session.partition
    weights = arrays(dict(module.named_parameters()))
    return {"counts": partition.counts, "log": partition.describe(), "weights": weights}


class Late(nn.Conv2d):
    """A convolution that waits, as if it had more to do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.008)
        return super().forward(x)


class CNN(PipelineModule):
    """Convolutions first, which are slow and small, then a large linear layer."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.example_input_array = torch.zeros(6, DIM)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), Late(1, 2), nn.BatchNorm2d(2), nn.ReLU(), Late(2, 2), nn.Flatten(),
            nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.model(2 * x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    configure_optimizers = Net.configure_optimizers


class WrongExample(CNN):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.example_input_array = torch.zeros(6, 5)


# Layers 1 and 4 are slow; where the cut between them is best, the machine decides.
BETWEEN_THE_SLOW = [(2, 7), (3, 6), (4, 5)]


def test_layers_are_measured_where_there_is_an_example(pools: Pools, tmp_path: Path) -> None:
    """The trace shows what that brings; an example that does not fit leaves the sizes."""
    found = {}
    for partition in ("uniform", "auto"):
        recording = ((PipelineTrace, {"dirpath": str(tmp_path / partition)}),)
        run = Run(CNN, samples=32, options={"partition": partition}, callbacks=recording)
        results = pools.run(2, fit_and_describe, run)
        recorded = read_run(tmp_path / partition)
        found[partition] = summarise(recorded)
        assert {result["counts"] for result in results} == {tuple(found[partition].layers)}
        if partition == "uniform":
            assert "Balance: the busiest stage, stage 0, " in table(recorded, found[partition])  # both slow layers
    assert tuple(found["uniform"].layers) == (6, 3)
    assert tuple(found["auto"].layers) in BETWEEN_THE_SLOW
    assert all(f"partition={found['auto'].layers} by measured times" in result["log"] for result in results)
    assert found["uniform"].balance > found["auto"].balance + 0.1
    assert "partition=[7, 2] by numbers of parameters" in fit_and_describe(staged(Run(WrongExample), 2))["log"]


class DisagreeingModel(nn.Sequential):
    """Every process has its own opinion."""

    def pipeline_costs(self) -> list[float]:
        return [3.0, 1.0, 1.0, 1.0] if os.environ["RANK"] == "0" else [1.0, 1.0, 1.0, 3.0]


class Disagreeing(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(3)
        layers = [nn.Linear(DIM, DIM) for _ in range(3)]
        self.model = DisagreeingModel(*layers, nn.Linear(DIM, 1))


def test_rank_0_decides_for_all(pools: Pools) -> None:
    run = Run(Disagreeing)
    results = pools.run(2, fit_and_describe, run)
    assert {result["counts"] for result in results} == {(1, 3)}
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, list(mini_batches_of(run)))[0])


def fit_twice(run: Run, partition: Any) -> list[Any]:
    """The same module under two Trainers, the second one with its own argument."""
    module = run.module(run)
    described = []
    for options in (run.options, {**run.options, "partition": partition}):
        trainer = make_trainer(replace(run, options=options))
        trainer.fit(module, loader(run))
        described.append(trainer.strategy.session.partition.describe())
    return described


def test_the_next_trainer_takes_the_cut_as_it_is(pools: Pools) -> None:
    run = Run(Net, options={"partition": [3, 6]}, samples=16)
    for first, second in pools.run(2, fit_twice, run, "auto"):
        assert first == "partition=[3, 6] as given"
        assert second == "partition=[3, 6] as the model was cut before"
    for outcome in pools.outcomes(2, fit_twice, run, [6, 3]):
        assert outcome.error == "ConfigurationError"
        assert "was already cut with partition=[3, 6] and cannot be cut with partition=[6, 3]" in outcome.message
