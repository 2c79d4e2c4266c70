"""Which layers each stage gets under the Trainer: what it goes by, what the log says, and what is refused."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import GPTModule, PipelineTrace
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.tools.recorded_run import read_run
from lightning_asyncpp.tools.trace_summary import summarise, table
from lightning_asyncpp.trainer.pipeline_module import PipelineModule
from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer


def fit_and_describe(run: Run) -> dict[str, Any]:
    """Train with the summary that Lightning prints by default; what was chosen, and the weights."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    trainer = make_trainer(run, enable_model_summary=True)
    trainer.fit(module, loader(run))
    session = trainer.strategy.session
    return {
        "counts": session.partition.counts,
        "log": session.partition.describe(),
        "weights": arrays(dict(module.named_parameters())),
        "example": None if module.example_input_array is None else tuple(module.example_input_array.shape),
    }


class Late(nn.Conv2d):
    """A convolution that waits, as if it had more to do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.wait = 0.008

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.wait)
        return super().forward(x)


class Picture(nn.Module):
    """A row of numbers as a picture; where the time goes is not where the parameters are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 1, 2, 3)


class CNN(PipelineModule):
    """Convolutions first, which are slow and small, then a large linear layer."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.example_input_array = torch.zeros(6, DIM)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            Picture(), Late(1, 2), nn.BatchNorm2d(2), nn.ReLU(), Late(2, 2), nn.Flatten(), nn.Linear(12, 64), nn.Tanh(),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.model(2 * x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    configure_optimizers = Net.configure_optimizers


class WithoutForward(CNN):
    """Its example is the network's own."""

    forward = L.LightningModule.forward

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch["x"]), batch["y"])


class WrongExample(CNN):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.example_input_array = torch.zeros(6, 5)


# Layers 1 and 4 are slow; where the cut between them is best, the machine decides.
BETWEEN_THE_SLOW = [(2, 7), (3, 6), (4, 5)]


@pytest.mark.parametrize("module", [CNN, WithoutForward])
def test_layers_are_measured_where_there_is_an_example(pools: Pools, module: Any) -> None:
    results = pools.run(2, fit_and_describe, Run(module, samples=16))
    (counts,) = {result["counts"] for result in results}
    assert counts in BETWEEN_THE_SLOW
    log = f"partition={list(counts)} by measured times, busiest stage 1."
    assert all(log in result["log"] for result in results)
    assert all(result["example"] == (6, DIM) for result in results)
    by_size = pools.run(2, fit_and_describe, Run(module, samples=16, options={"partition": "uniform"}))
    assert {result["counts"] for result in by_size} == {(6, 3)}
    names = [{name for result in of_two for name in result["weights"]} for of_two in (results, by_size)]
    assert names[0] == names[1]


def test_an_example_that_does_not_fit_leaves_the_sizes(pools: Pools) -> None:
    results = pools.run(2, fit_and_describe, Run(WrongExample, samples=16))
    assert {result["counts"] for result in results} == {(7, 2)}
    assert "partition=[7, 2] by numbers of parameters, busiest stage 1.86 times the mean" in results[0]["log"]


def test_the_trace_shows_what_the_measured_cut_brings(pools: Pools, tmp_path: Path) -> None:
    found = {}
    for partition in ("uniform", "auto"):
        recording = ((PipelineTrace, {"dirpath": str(tmp_path / partition)}),)
        pools.run(2, fit, Run(CNN, samples=32, options={"partition": partition}, callbacks=recording))
        run = read_run(tmp_path / partition)
        found[partition] = summarise(run)
    assert "Balance: the busiest stage, stage 0, " in table(run, found["uniform"])  # both of the slow layers
    assert tuple(found["uniform"].layers) == (6, 3)
    assert tuple(found["auto"].layers) in BETWEEN_THE_SLOW
    assert found["uniform"].balance > found["auto"].balance + 0.1


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


def wordy_gpt(run: Run) -> GPTModule:
    """The head costs as much as ten blocks."""
    config = GPTConfig(vocab_size=1024, context_length=8, num_layers=6, dim=16, num_heads=2, mlp_dim=32)
    return GPTModule(config, optimizer=run.make_optimizer, decay="constant")


@pytest.mark.parametrize(("stages", "counts"), [pytest.param(2, (7, 1), marks=pytest.mark.slow), (3, (4, 3, 1))])
def test_a_head_over_many_words_stands_alone_or_nearly(pools: Pools, stages: int, counts: tuple[int, ...]) -> None:
    run = Run(wordy_gpt, dataset="tokens", samples=24)
    results = pools.run(stages, fit_and_describe, run)
    assert {result["counts"] for result in results} == {counts}
    assert_equal_weights(joined_weights(results, stages), oracle(run, stages, list(mini_batches_of(run)))[0])


# -- checkpoints and modules that were cut before ---------------------------------------------------------------------


def test_a_checkpoint_knows_its_partition(pools: Pools, tmp_path: Path) -> None:
    saving = ((ModelCheckpoint, {"dirpath": tmp_path, "filename": "run"}),)
    run = Run(Net, options={"microbatches": 3}, trainer={"enable_checkpointing": True}, callbacks=saving)
    whole = pools.run(2, fit, replace(run, trainer=run.trainer | {"max_epochs": 2}, callbacks=()))
    pools.run(2, fit, run)
    path = tmp_path / "run.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["pipeline"]["partition"] == [4, 5]

    def resume(partition: Any, path: Path = path) -> Run:
        options = {"microbatches": 3, "partition": partition}
        return replace(run, options=options, callbacks=(), ckpt_path=str(path), trainer={"max_epochs": 2})

    for partition in ("uniform", [4, 5]):
        resumed = pools.run(2, fit, resume(partition))
        assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


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


# -- mistakes ---------------------------------------------------------------------------------------------------------


class WrongCosts(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = DisagreeingModel(nn.Linear(DIM, DIM), nn.Linear(DIM, 1))


MISTAKES: list[tuple[Any, dict[str, Any], list[str]]] = [
    (Net, {"partition": "balanced"}, ["partition='balanced' must be 'auto', 'uniform', or a list", "such as [3, 4]"]),
    (Net, {"partition": [4.0, 5]}, ["partition=[4.0, 5] must be 'auto'"]),
    (Net, {"partition": 2}, ["partition=2 must be 'auto'"]),
    (Net, {"partition": [9, 0]}, ["partition=[9, 0] gives stage 1 no layer"]),
    (Net, {"partition": [3, 3, 3], "microbatches": 3}, ["partition=[3, 3, 3] is for 3 stages, but there are 2"]),
    (Net, {"partition": [4, 4]}, ["partition=[4, 4] places 8 layers, but the model has 9"]),
    (Net, {"partition": [9, 1], "microbatches": 2}, ["partition=[9, 1] places 10 layers, but the model has 9"]),
    (CNN, {"partition": [1, 8]}, ["leaves stage 0 (layers 0 to 0) without parameters", "do are 1, 2, 4, 6, 8"]),
    (WrongCosts, {}, ["DisagreeingModel.pipeline_costs() must return one cost for each of the 2 layers"]),
    (Net, {"partition": "x", "microbatches": 0}, ["2 problems"]),
]


@pytest.mark.parametrize(("module", "options", "parts"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes(pools: Pools, module: Any, options: dict[str, Any], parts: list[str]) -> None:
    outcomes = pools.outcomes(2, fit, Run(module, options=options))
    assert [outcome.error for outcome in outcomes] == ["ConfigurationError"] * 2
    for outcome in outcomes:
        assert all(part in outcome.message for part in parts), outcome.message
