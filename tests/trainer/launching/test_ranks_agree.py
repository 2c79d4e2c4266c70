"""Ranks that were started with something else are refused before the first batch, with both values; nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_asyncpp.strategy_parts import mixin
from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, fit

Make = Callable[..., torch.optim.Optimizer]


class Told(Net):
    """Its optimizer is that of this process, and so is the width of its last layer."""

    def __init__(self, run: Run, make: Make, width: int) -> None:
        super().__init__(run)
        self.make = make
        *layers, last = self.model
        self.model = nn.Sequential(
            *layers, nn.Sequential(nn.Linear(last.in_features, width), nn.Linear(width, last.out_features))
        )

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    # what the last rank is told otherwise -> what all ranks say
    "lr": ({"make": partial(torch.optim.AdamW, lr=0.1)}, "optimizer group 0 lr is 0.001 on rank 0 and 0.1 on rank 1"),
    "class": ({"make": torch.optim.SGD}, "optimizer is AdamW on rank 0 and SGD on rank 1"),
    "layer": (
        {"width": 7},
        "parameter 8.0.weight is [5, 6] torch.float32 on rank 0 and [7, 6] torch.float32 on rank 1",
    ),
    "policy": ({"nonfinite_gradients": "skip"}, "nonfinite_gradients is 'stop' on rank 0 and 'skip' on rank 1"),
    "replicas": ({"data_parallel_size": 2}, "data_parallel_size is 1 on rank 0 and 2 on rank 1"),
    "form": ({"state_dict_type": "sharded"}, "state_dict_type is full on rank 0 and sharded on rank 1"),
    "strategy": ({"strategy": "sync"}, "delay is 1 on rank 0 and 0 on rank 1"),
}


def train(make: Make = torch.optim.AdamW, width: int = 5, strategy: str = "async", **options: Any) -> None:
    """A run of what this rank is told."""
    run = Run(lambda run: Told(run, make, width), strategy, samples=16, options={"micro_batches": 2, **options})
    fit(replace(run, trainer={"max_steps": 2, "max_epochs": -1}))


def train_by_name(name: str) -> None:
    """A run in which rank 1 is told something else."""
    train(**(OTHER[name][0] if os.environ["RANK"] == "1" else {}))


@pytest.mark.parametrize("name", OTHER)
def test_what_ranks_must_share(pools: Pools, name: str) -> None:
    for outcome in pools.outcomes(2, train_by_name, name):
        assert outcome.error == "ConfigurationError"
        assert OTHER[name][1] in outcome.message, outcome.message
        assert "tart all ranks with the same script, recipe, arguments and versions" in outcome.message


def other_versions() -> None:
    """Rank 1 has another torch."""
    found = {"lightning": "2.6.6", "torch": "2.11.9" if os.environ["RANK"] == "1" else "2.12.0"}
    with mock.patch.object(mixin, "installed_versions", return_value=found):
        train()


def test_other_versions(pools: Pools) -> None:
    for outcome in pools.outcomes(2, other_versions):
        assert "torch is 2.12.0 on rank 0 and 2.11.9 on rank 1" in outcome.message.replace("'", "")


def test_replicas_that_differ(pools: Pools) -> None:
    for outcome in pools.outcomes(4, train_replica_by_name, "lr"):
        assert "optimizer group 0 lr is 0.001 on rank 0 and 0.1 on rank 1" in outcome.message


def train_replica_by_name(name: str) -> None:
    """As :func:`train_by_name`, with two replicas."""
    other = OTHER[name][0] if os.environ["RANK"] == "1" else {}
    train(data_parallel_size=2, **other)
