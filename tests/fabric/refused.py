"""Wrong uses of the Fabric strategies, each run on every rank; all of them raise."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_asyncpp.errors import NonFiniteGradientError
from lightning_asyncpp.fabric import AsyncPipelineStrategy, SyncPipelineStrategy
from tests.helpers.cases import DIM, Case, make_model
from tests.helpers.fabric import Run, make_fabric

CASE = Case(4)


def _parts(**options: Any) -> tuple[AsyncPipelineStrategy, L.Fabric, nn.Module]:
    strategy = AsyncPipelineStrategy(**options)
    return strategy, make_fabric(strategy), make_model()


def optimizer_before_module() -> None:
    _, fabric, model = _parts()
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))


def two_optimizers() -> None:
    run = Run(CASE)
    run.fabric.setup_optimizers(torch.optim.SGD(run.model.parameters(), lr=0.1))


def two_models() -> None:
    run = Run(CASE)
    run.fabric.setup_module(make_model())


def fp16() -> None:
    fabric = make_fabric(AsyncPipelineStrategy(), precision="16-true")
    fabric.setup_module(make_model())


def wrong_reduction() -> None:
    _, fabric, model = _parts()
    model.loss_reduction = "max"
    fabric.setup_module(model)


def uncuttable_model() -> None:
    _, fabric, _ = _parts()
    fabric.setup_module(nn.Bilinear(2, 2, 2))


def no_initialiser_on_the_last_stage() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    _, fabric, _ = _parts()
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), Bare())
    fabric.setup_module(model)


def too_few_microbatches() -> None:
    make_fabric(AsyncPipelineStrategy(microbatches=1))


def partition_of_another_model() -> None:
    _, fabric, model = _parts(partition=[4, 4])
    fabric.setup_module(model)


def partition_for_more_stages() -> None:
    make_fabric(AsyncPipelineStrategy(partition=[3, 3, 3]))


def train_without_optimizer() -> None:
    strategy, fabric, model = _parts()
    fabric.setup_module(model)
    strategy.training_step(CASE.step(model), CASE.batch(0))


def during_an_update(case: Case, path: str) -> tuple[dict[str, Any], list[set[str]]]:
    """Save, flush, gather and evaluate where the optimizer steps, and go on; what each was told, over all updates."""
    run, told = Run(case), [set[str]() for _ in range(5)]
    tries = (
        lambda: run.fabric.save(path, run.state),
        lambda: run.fabric.load(path, run.state),
        run.strategy.drain,
        run.strategy.full_state_dict,
        run.evaluate,
    )

    def meet(*_: Any) -> None:
        for number, attempt in enumerate(tries):
            try:
                attempt()
                told[number].add("")
            except RuntimeError as error:
                told[number].add(str(error))
        run.model.train()

    run.optimizer.optimizer.register_step_pre_hook(meet)
    run.optimizer.optimizer.register_step_post_hook(meet)
    run.train()
    return run.result(), told


def _after_a_batch() -> Run:
    run = Run(CASE)
    run.strategy.training_step(CASE.step(run.model), CASE.batch(0))
    return run


def other_norm() -> None:
    run = _after_a_batch()
    run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0, norm_type=float("inf"))


def both_clippings() -> None:
    run = _after_a_batch()
    run.fabric.clip_gradients(run.model, run.optimizer, clip_val=1.0)
    run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)


def load_another_model(path: str) -> None:
    _, fabric, _ = _parts()
    model = fabric.setup_module(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(11))))
    fabric.load(path, {"model": model})


def model_not_called() -> None:
    run = Run(CASE)
    run.strategy.training_step(lambda batch: F.mse_loss(batch["x"], batch["x"]), CASE.batch(0))


def save(path: str) -> None:
    """The checkpoint that others fail to load."""
    run = Run(Case(3))
    run.train(stop=2)
    run.fabric.save(path, run.state)


def collective_after_failure() -> None:
    run = Run(CASE)
    with torch.no_grad():
        next(iter(run.strategy.session.stage.parameters.values())).fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteGradientError):
        run.train()
    run.fabric.barrier()


def unknown_argument() -> None:
    SyncPipelineStrategy(micro_batches=3)
