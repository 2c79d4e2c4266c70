"""The state of a whole pipeline, gathered on rank 0 and handed back to the stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import ConfigurationError, lost_peers
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.session import PipelineSession
from lightning_asyncpp.pipeline.tree import map_tensors

GATHERED_OPTIMIZER = "pipeline_stages"
"""Key of an optimizer's state in a checkpoint of a pipeline: a list, one entry per stage."""


def gather_stages(mesh: Mesh, part: Any) -> list[Any]:
    """Gather one object per stage of the first replica on rank 0, first stage first; elsewhere an empty list.

    A blocking collective. The objects travel between the run's own processes only.
    """
    if mesh.groups is None:
        return [part]
    part = map_tensors(lambda tensor: tensor.detach().cpu(), part) if mesh.replica == 0 else None
    gathered: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
    with lost_peers():
        dist.gather_object(part, gathered, dst=0, group=mesh.groups.host)
    return [] if gathered is None else [gathered[mesh.rank_of(stage, replica=0)] for stage in range(mesh.num_stages)]


def merge(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the dictionaries of the stages; on a key that several have, the last stage's value counts."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged


def pipeline_state(session: PipelineSession) -> dict[str, Any]:
    """What a checkpoint holds beyond weights and optimizers, on rank 0; a blocking collective on a drained pipeline.

    The older weight version belongs to it: the mini-batch after the checkpoint runs on it.
    """
    engine = session.running()
    older = gather_stages(engine.mesh, engine.weights.older() or {})
    return {
        "num_stages": engine.mesh.num_stages,
        "data_parallel_size": engine.mesh.num_replicas,
        "delay": engine.settings.delay,
        "fresh_last_stage": engine.settings.settings.fresh_last_stage,
        "synchronous_start": engine.settings.synchronous_start,
        "micro_batches": engine.settings.micro_batches,
        "seed": engine.runner.seed,
        "engine": engine.state_dict(),
        "older_weights": merge(older),
    }


def load_pipeline_state(session: PipelineSession, state: Mapping[str, Any] | None) -> None:
    """Go on where a checkpoint ended; the weights were loaded before. Without a state, both versions are the weights.

    Raises:
        ConfigurationError: the checkpoint belongs to another schedule.
    """
    engine = session.running()
    if state is None:
        engine.weights.restore(0, None)
        return
    state = {"fresh_last_stage": False, "synchronous_start": 0, **state}
    problems = [
        f"the checkpoint was written with {name}={state.get(name)}, this run has {value}: resuming with another"
        f" value is not supported yet; use {name}={state.get(name)}"
        for name, value in (
            ("data_parallel_size", engine.mesh.num_replicas),
            ("delay", engine.settings.delay),
            ("fresh_last_stage", engine.settings.settings.fresh_last_stage),
            ("synchronous_start", engine.settings.synchronous_start),
            ("micro_batches", engine.settings.micro_batches),
        )
        if state.get(name) != value
    ]
    if problems:
        raise ConfigurationError.from_problems(problems)
    older: dict[str, Tensor] = state["older_weights"]
    has_older = older and engine.weights.room > 1
    own = {name: older[name] for name in engine.weights.parameters} if has_older else None
    engine.load_state_dict(state["engine"], own)
    session.tell_delay()  # before the optimizer's state is loaded: it keeps what it needs under its delay
    engine.runner.seed = session.seed = int(state["seed"])


def own_optimizer_state(mesh: Mesh, state: Mapping[str, Any]) -> dict[str, Any]:
    """This stage's part of an optimizer state that was gathered from all stages.

    Raises:
        ConfigurationError: it was written by another strategy or for another number of stages.
    """
    stages = state.get(GATHERED_OPTIMIZER)
    if stages is None:
        raise ConfigurationError(
            "the optimizer state in this checkpoint was not written by a pipeline strategy and cannot be cut into"
            " stages; load only the weights: pass the model loaded with load_state_dict, without ckpt_path"
        )
    if len(stages) != mesh.num_stages:
        raise ConfigurationError(
            f"the checkpoint was written by {len(stages)} stages, this run has {mesh.num_stages}: resuming with another"
            f" number of stages is not supported yet; use devices={len(stages) * mesh.num_replicas}"
        )
    return dict(stages[mesh.stage])


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor of a nested state to a device."""
    return map_tensors(lambda tensor: tensor.to(device), tree)
