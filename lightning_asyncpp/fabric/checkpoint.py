"""Fabric checkpoints of a pipeline: gathered from all stages on rank 0, and handed back to each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.fabric import refusals
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.session import PipelineSession
from lightning_asyncpp.pipeline.state import (
    GATHERED_OPTIMIZER,
    gather_stages,
    load_pipeline_state,
    merge,
    own_optimizer_state,
    pipeline_state,
    to_device,
)

PIPELINE = "pipeline"


def gather_model(session: PipelineSession) -> dict[str, Any]:
    """The whole model's ``state_dict`` on rank 0, this stage's part elsewhere; a blocking collective."""
    stage, mesh = session.stage, session.running().mesh
    assert stage is not None
    own = stage.state_dict()
    parts = gather_stages(mesh, own)
    return merge(parts) if parts else own


def gather_state(session: PipelineSession, state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the pipeline's model and optimizer in a checkpoint's state by what rank 0 writes; a blocking collective.

    With the optimizer comes what else the run needs to go on, under ``"pipeline"``.

    Raises:
        ConfigurationError: that name is taken.
    """
    if PIPELINE in state:
        raise ConfigurationError(refusals.RESERVED_NAME)
    gathered = dict(state)
    for name, value in state.items():
        if session.stage is not None and value is session.stage.model:
            gathered[name] = gather_model(session)
        elif session.optimizer is not None and value is session.optimizer:
            gathered[name] = {GATHERED_OPTIMIZER: gather_stages(session.running().mesh, value.state_dict())}
            gathered[PIPELINE] = pipeline_state(session)
    return gathered


def load_model(session: PipelineSession, names: Collection[str], state: Mapping[str, Any], strict: bool) -> None:
    """Load this stage's entries of a whole model's ``state_dict``; both weight versions become what was loaded.

    Args:
        session: a drained pipeline.
        names: the entries of the whole model.
        state: name -> tensor, of the whole model.
        strict: whether the names must agree.

    Raises:
        ConfigurationError: they do not; every rank finds the same.
    """
    stage, engine = session.stage, session.running()
    assert stage is not None
    if strict and (problems := _key_problems(names, state)):
        raise ConfigurationError.from_problems(problems)
    own = stage.state_dict().keys()
    stage.model.load_state_dict({name: value for name, value in state.items() if name in own}, strict=strict)
    engine.weights.restore(engine.weights.newest, None)


def load_optimizer(session: PipelineSession, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this stage's part of a gathered optimizer state.

    Raises:
        ConfigurationError: the optimizer was not set up, or the state belongs to another number of stages.
    """
    if optimizer is not session.optimizer:
        raise ConfigurationError(refusals.NO_OPTIMIZER_TO_LOAD)
    engine = session.running()
    optimizer.load_state_dict(to_device(own_optimizer_state(engine.mesh, state), engine.runner.device))


def load_progress(session: PipelineSession, state: Mapping[str, Any] | None) -> None:
    """Go on where the checkpoint ended; weights and optimizer were loaded before."""
    load_pipeline_state(session, state)


def check_loadable(module: nn.Module) -> None:
    """Refuse to load into a module that has no memory yet.

    Raises:
        ConfigurationError: it is on the meta device.
    """
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigurationError(refusals.META_LOAD)


def _key_problems(names: Collection[str], state: Mapping[str, Any]) -> list[str]:
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in names]
    return [
        f"the checkpoint's model {what}: {', '.join(keys[:8])}{' and more' if len(keys) > 8 else ''}; build the model"
        " that was saved, or pass strict=False"
        for what, keys in (("lacks entries", missing), ("has entries that this model lacks", unexpected))
        if keys
    ]
