"""An optimizer while updates come out of an engine: nothing is held afterwards."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch.optim import SGD

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.stage_optimizer import AttachedOptimizer, StageOptimizer

CPU = torch.device("cpu")


def engine_of_one_stage() -> Engine:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    stage = cut(model, 0, 1, 0, CPU)
    return Engine(stage, Mesh(1, 1, 0), PipelineSettings(1, delay=0).resolved(1), 0, CPU, UserHooks(model_name="call"))


def train_a_batch(engine: Engine, attached: AttachedOptimizer) -> None:
    model = engine.stage.model
    engine.run(torch.ones(2, 2), lambda batch, weight: model(batch).mean())
    engine.complete(attached.stage_optimizer.hyper_parameters())
    engine.apply_due()


def test_an_engine_that_was_released_goes_at_once_with_its_weights() -> None:
    engine = engine_of_one_stage()
    optimizer = SGD(engine.stage.model.parameters(), lr=0.1)
    stage_optimizer = StageOptimizer(optimizer, engine.stage.parameters.values())
    attached = AttachedOptimizer(stage_optimizer, engine, lambda update: optimizer.step())
    train_a_batch(engine, attached)
    gc.collect()
    gc.disable()
    try:
        attached.release()
        gone = weakref.ref(engine)
        del engine, attached
        assert gone() is None
        optimizer.step()  # anybody may
    finally:
        gc.enable()
