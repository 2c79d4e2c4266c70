"""``self.all_gather`` and other collectives in a module's hooks are over replicas, and wait for no other stage."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch

from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, evaluate, fit, loader, make_trainer


class Gathers(Net):
    """Gathers what its steps collected, after the early return that other stages need."""

    outputs: list[torch.Tensor]

    def on_validation_epoch_start(self) -> None:
        self.outputs = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.outputs.append(self.model(batch["x"]))

    def on_validation_epoch_end(self) -> None:
        everywhere = self.all_gather(torch.tensor(1.0))
        self.log("replicas", float(len(everywhere)))
        if not self.outputs:
            return
        gathered = self.all_gather({"out": torch.cat(self.outputs)})["out"]
        self.log("mean", gathered.mean())
        self.log("first dimension", float(len(gathered)))
        own = torch.cat(self.outputs).mean()
        self.log("synchronised", own, sync_dist=True)
        self.log("most", own, sync_dist=True, reduce_fx="max")
        strategy = self.trainer.strategy
        strategy.barrier()
        self.log("reduced", strategy.reduce(own, reduce_op="mean"))
        self.log("replica 0", strategy.broadcast(float(own), src=0))


class Counts(L.Callback):
    """A callback's own, in hooks around them."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.gathered = module.all_gather(torch.tensor(float(trainer.global_rank))).tolist()


@pytest.mark.parametrize(
    ("stages", "replicas", "placement"),
    [
        pytest.param(2, 1, "pipeline_within_node", marks=pytest.mark.slow),
        (3, 1, "pipeline_within_node"),
        (2, 2, "pipeline_across_nodes"),
        pytest.param(2, 2, "pipeline_within_node", marks=pytest.mark.slow),
    ],
)
def test_over_replicas(pools: Pools, stages: int, replicas: int, placement: str) -> None:
    options = {"micro_batches": 3, "data_parallel_size": replicas, "placement": placement}
    run = Run(Gathers, options=options, samples=16, val_samples=(24,), trainer={"max_epochs": 1})
    one = pools.run(1, evaluate, dataclasses.replace(run, strategy="sync", options={"micro_batches": 3}), "validate")
    many = pools.run(stages * replicas, evaluate, run, "validate")
    expected = one[0]["returned"][0]
    for result in many:
        (found,) = result["returned"]
        assert found["replicas"] == found["first dimension"] == replicas
        for name in ("mean", "synchronised", "reduced"):
            assert found[name] == pytest.approx(expected["mean"], rel=1e-5)
        assert found["most"] >= found["mean"] - 1e-6
        assert found == many[0]["returned"][0]


def test_what_is_gathered_elsewhere(pools: Pools) -> None:
    """A hook that all stages run: each gathers over its own replicas."""
    run = Run(Net, options={"data_parallel_size": 2}, samples=16)
    assert pools.run(4, gathered_at_start, run) == [[0.0, 2.0], [1.0, 3.0]] * 2


def gathered_at_start(run: Run) -> list[float]:
    counts = Counts()
    make_trainer(run, callbacks=[counts]).fit(run.module(run), loader(run))
    return counts.gathered


class OneReplica(Gathers):
    """Forgets the call in one replica."""

    def on_validation_epoch_end(self) -> None:
        if self.outputs and self.global_rank == 0:
            self.all_gather(torch.ones(1))


def test_a_call_that_a_replica_forgets_is_named(pools: Pools) -> None:
    options = {"data_parallel_size": 2, "timeout": timedelta(seconds=3)}
    outcomes = pools.outcomes(4, evaluate, Run(OneReplica, options=options, val_samples=(16,)), "validate")
    assert "all_gather in on_validation_epoch_end waited for the other replicas in vain" in outcomes[0].message


class SumsBadly(Gathers):
    def on_validation_epoch_end(self) -> None:
        self.log("product", 1.0, sync_dist=True, reduce_fx=torch.prod)


def test_a_reduction_that_is_not_known_is_refused(pools: Pools) -> None:
    outcomes = pools.outcomes(2, fit, Run(SumsBadly, val_samples=(8,), samples=8))
    assert {outcome.error for outcome in outcomes} == {"ConfigurationError"}
    assert "self.all_gather" in outcomes[0].message
