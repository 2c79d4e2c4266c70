"""Ranks whose strategies were given other arguments are refused before the first batch; nothing hangs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit

OTHER: dict[str, tuple[dict[str, Any], str]] = {
    # what the last rank is told otherwise -> what all ranks say
    "replicas": ({"data_parallel_size": 2}, "data_parallel_size is 1 on rank 0 and 2 on rank 1"),
    "form": ({"state_dict_type": "sharded"}, "state_dict_type is full on rank 0 and sharded on rank 1"),
    "strategy": ({"strategy": "sync"}, "delay is 1 on rank 0 and 0 on rank 1"),
}


def train_by_name(name: str) -> None:
    """A run in which rank 1 is told something else."""
    told = dict(OTHER[name][0] if os.environ["RANK"] == "1" else {})
    run = Run(Net, told.pop("strategy", "async"), samples=16, options={"microbatches": 2, **told})
    fit(replace(run, trainer={"max_steps": 2, "max_epochs": -1}))


@pytest.mark.parametrize("name", OTHER)
def test_what_ranks_must_share(pools: Pools, name: str) -> None:
    for outcome in pools.outcomes(2, train_by_name, name):
        assert outcome.error == "ConfigurationError"
        assert OTHER[name][1] in outcome.message, outcome.message
        assert "tart all ranks with the same script, recipe and arguments" in outcome.message
