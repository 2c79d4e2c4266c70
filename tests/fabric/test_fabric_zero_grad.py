"""A Fabric loop that throws gradients away: ``optimizer.zero_grad()`` in the place of ``optimizer.step()``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import OptimizerCallable

from tests.helpers.cases import Case
from tests.helpers.fabric import Run
from tests.helpers.oracle import assert_equal_weights


def train(stages: int, accumulate: int, skip: bool) -> dict[str, np.ndarray]:
    """A mini-batch is left out of the data (``skip``), or trained and its gradient thrown away."""
    case = Case(3, delay=0, accumulate=accumulate, batch_sizes=(6,) * 7 * accumulate)
    run = Run(case, stages=stages)
    run.train(stop=3)
    for index in () if skip else case.mini_batches[3]:
        run.strategy.training_step(case.step(run.model), case.batch(index))
    run.optimizer.zero_grad()
    run.train(start=4)
    return run.result()["weights"]


@pytest.mark.parametrize(("stages", "accumulate"), [(1, 2), (3, 1)])
def test_a_synchronous_pipeline_trains_as_if_the_batch_had_not_been(stages: int, accumulate: int) -> None:
    assert_equal_weights(train(stages, accumulate, False), train(stages, accumulate, True))


def test_the_command_line_still_finds_an_optimizer_by_its_name() -> None:
    run = Run(Case(3), stages=2)
    assert isinstance(run.optimizer.optimizer, torch.optim.AdamW)
    parser = ArgumentParser()
    parser.add_argument("--optimizer", type=OptimizerCallable)
    assert parser.parse_args(["--optimizer=AdamW"]).optimizer.class_path == "torch.optim.AdamW"
