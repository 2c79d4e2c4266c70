"""Random numbers depend only on what is computed, and the state of the process's own generator does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.randomness import seed_generators
from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.helpers.cases import Case
from tests.helpers.engine import Training
from tests.helpers.failing import Run


def run_of_one_stage() -> Run:
    return Run(Mesh(1, 1, 0))


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_a_batch_leaves_the_generator_alone(kind: str) -> None:
    run = run_of_one_stage()
    batch = run.case.batch(0, 0)
    drawn: list[Tensor] = []

    def step(microbatch: Any, weight: float) -> Tensor:
        drawn.append(torch.rand(1))
        return run.step(microbatch, weight)

    before = torch.get_rng_state()
    if kind == "training":
        run.engine.run(batch, step)
    else:
        with torch.no_grad():
            run.engine.evaluate(batch, step)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({float(number) for number in drawn}) == run.microbatches, "each microbatch draws its own"


@pytest.mark.parametrize("drained", [False, True])
def test_what_a_backward_draws_does_not_depend_on_drains(drained: bool) -> None:
    run, drawn = run_of_one_stage(), []

    def draw_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: drawn.append(float(torch.rand(1))))

    run.model[0].register_forward_hook(draw_in_backward)
    before = torch.get_rng_state()
    for index in range(2):
        run.train(index)
        torch.rand(index + 1)
        if drained:
            run.drain()
    expected = []
    for k in range(2 * run.microbatches):
        seed_generators(0, torch.device("cpu"), "backward", 0, 0, k)
        expected.append(float(torch.rand(1)))
    assert drawn == expected
    torch.set_rng_state(before)


def test_every_stage_draws_its_own_numbers_in_every_update_of_a_resumed_run() -> None:
    case, drawn = Case(3), []
    training = Training(case, Mesh(1, 1, 0), 2)
    for first in (0, 2):
        training = training.resumed() if first else training
        training.optimizer.register_step_pre_hook(lambda *_: drawn.append(float(torch.rand(()))))
        for index in (first, first + 1):
            training.complete([training.engine.run(case.batch(index), case.step(training.model))])
    training.drain()
    assert len(drawn) == len(set(drawn)) == 8
