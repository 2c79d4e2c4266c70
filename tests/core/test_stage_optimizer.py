"""A stage's optimizer steps with earlier hyperparameters; test_processes.py tests how it is saved and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_asyncpp.core.stage_optimizer import StageOptimizer
from lightning_asyncpp.errors import ConfigurationError


def alone(optimizer: Optimizer) -> StageOptimizer:
    return StageOptimizer(optimizer, [p for group in optimizer.param_groups for p in group["params"]])


def test_hyper_parameters_are_copies_and_what_came_later_stays() -> None:
    only = nn.Parameter(torch.tensor([1.0, 2.0]))
    only.grad = torch.ones(2)
    optimizer = SGD([only], lr=torch.tensor(0.5))
    optimizer.param_groups[0]["extra"] = {"values": [1]}
    stage = alone(optimizer)
    earlier = stage.hyper_parameters()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.param_groups[0]["extra"]["values"].append(2)
    optimizer.param_groups[0]["later"] = 1
    stage.step(earlier, optimizer.step)
    assert only.tolist() == [0.5, 1.5]
    assert (optimizer.param_groups[0]["lr"].item(), optimizer.param_groups[0]["later"]) == (0.25, 1)
    assert earlier[0]["extra"] == {"values": [1]}


def test_what_a_hook_sets_stays_until_somebody_else_sets_it() -> None:
    only = nn.Parameter(torch.tensor(2.0))
    only.grad = torch.ones(())
    optimizer = SGD([only], lr=0.1)
    group, stage = optimizer.param_groups[0], alone(optimizer)

    def step() -> None:
        group["lr"] = 0.5
        optimizer.step()

    stage.step(stage.hyper_parameters(), step)
    assert (only.item(), group["lr"]) == (1.5, 0.5)
    earlier = stage.hyper_parameters()
    group["lr"] = 0.25  # by a scheduler, after the batch
    stage.step(earlier, step)
    assert (only.item(), group["lr"]) == (1.0, 0.25)


def test_other_groups_are_refused() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    stage = alone(SGD([first, second], lr=0.1))
    with pytest.raises(ConfigurationError, match=r"groups of \[1, 1\] parameters, but this run's has \[2\]"):
        stage.load_state_dict(SGD([{"params": [first]}, {"params": [second]}], lr=0.1).state_dict())
