"""A Fabric script in which one rank fails, in training, between batches or in an evaluation, unknown to the others."""

from __future__ import annotations

import sys

import lightning as L
import torch
from torch import Tensor

from lightning_asyncpp.fabric import AsyncPipelineStrategy
from tests.helpers.cases import Case, make_model

CASE = Case(3, batch_sizes=(6,) * 30)


def main(stage: int, where: str) -> None:
    strategy = AsyncPipelineStrategy(microbatches=3)
    fabric = L.Fabric(strategy=strategy, devices=3, accelerator="cpu")
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    mesh = strategy.session.mesh
    assert mesh is not None
    failing = mesh.stage == stage

    def step_fn(microbatch: dict[str, Tensor]) -> Tensor:
        if failing and where in ("step", "evaluation") and armed:
            raise ValueError("the user's own mistake")
        return CASE.step(model)(microbatch)

    armed = False
    for index in range(30):
        armed = index == 10 and where == "step"
        if failing and where == "loop" and index == 10:
            raise ValueError("the user's own mistake")
        strategy.training_step(step_fn, CASE.batch(index))
        optimizer.step()
        if where == "evaluation" and index == 10:
            armed = True
            strategy.evaluation_step(step_fn, CASE.batch(index))
            armed = False
    strategy.drain()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
