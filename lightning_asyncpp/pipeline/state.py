"""The state of a whole pipeline, gathered on rank 0 and handed back to the stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.errors import ConfigurationError, lost_peers
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.partition import Partition
from lightning_asyncpp.pipeline.session import PipelineSession
from lightning_asyncpp.pipeline.tied_state import keep_once, keep_optimizers_once
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


def gather_model_state(session: PipelineSession, own: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The whole model's ``state_dict`` on rank 0, ``own`` elsewhere; a blocking collective on a drained pipeline.

    Args:
        session: the pipeline.
        own: this stage's part.
        prefix: of the model's names in it.
    """
    assert session.stage is not None
    weights = session.running().weights.shown()
    # By the whole name: what stands beside the model may be called like one of its layers.
    shown = {prefix + name: weights[use] for name, use in session.stage.names.items() if use in weights}
    own = {name: shown.get(name, value) for name, value in own.items()}
    parts = gather_stages(session.running().mesh, own)
    return keep_once(merge(parts), session.whole_model.ties, prefix) if parts else own


def gather_optimizer_state(session: PipelineSession, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer states of all stages on rank 0, an empty list elsewhere; a blocking collective."""
    mesh, stage = session.running().mesh, session.stage
    assert stage is not None
    states = gather_stages(mesh, optimizer.state_dict())
    shapes = {name: parameter.shape for name, parameter in stage.parameters.items()}
    return {GATHERED_OPTIMIZER: keep_optimizers_once(states, session.whole_model.ties, shapes)}


def pipeline_state(session: PipelineSession) -> dict[str, Any]:
    """What a checkpoint holds beyond weights and optimizers, on rank 0; a blocking collective on a drained pipeline.

    The older weight version belongs to it: the mini-batch after the checkpoint runs on it.
    """
    engine = session.running()
    older = gather_stages(engine.mesh, engine.weights.older() or {})
    masters = gather_stages(engine.mesh, engine.weights.masters() or {}) if engine.weights.has_masters else []
    return {
        "num_stages": engine.mesh.num_stages,
        "data_parallel_size": engine.mesh.num_replicas,
        "delay": engine.settings.delay,
        "fresh_last_stage": engine.settings.settings.fresh_last_stage,
        "synchronous_start": engine.settings.synchronous_start,
        "micro_batches": engine.settings.micro_batches,
        "partition": list(_partition(session).counts),
        "seed": engine.runner.seed,
        "engine": engine.state_dict(),
        "older_weights": keep_once(merge(older), session.whole_model.ties),
        "weight_dtype": engine.settings.settings.weight_dtype,
        "masters": keep_once(merge(masters), session.whole_model.ties),
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
    partition = _partition(session)
    earlier = {
        "fresh_last_stage": False, "synchronous_start": 0, "weight_dtype": None, "partition": list(partition.uniform),
    }  # fmt: skip
    state = {**earlier, **state}
    _check_stages(engine.mesh, state["num_stages"])
    problems = [
        f"the checkpoint was written with {name}={state.get(name)}, this run has {value}: resuming with another"
        f" value is not supported yet; use {name}={state.get(name)}"
        for name, value in (
            ("data_parallel_size", engine.mesh.num_replicas),
            ("delay", engine.settings.delay),
            ("fresh_last_stage", engine.settings.settings.fresh_last_stage),
            ("synchronous_start", engine.settings.synchronous_start),
            ("micro_batches", engine.settings.micro_batches),
            ("weight_dtype", engine.settings.settings.weight_dtype),
            ("partition", list(partition.counts)),
        )
        if state.get(name) != value
    ]
    if problems:
        raise ConfigurationError.from_problems(problems)
    older: dict[str, Tensor] = state["older_weights"]
    has_older = older and engine.weights.room > 1
    names = [*engine.weights.parameters, *engine.weights.buffers]
    if has_older and (missing := [name for name in names if name not in older]):
        raise ConfigurationError(
            f"the checkpoint holds no older weights of {', '.join(missing[:5])}, on which the next mini-batch runs:"
            " they were frozen when it was written, or it is another model's; freeze and train the same parameters, or"
            " load only the weights: pass the model loaded with load_state_dict, without ckpt_path"
        )
    own = {name: older[name] for name in names} if has_older else None
    masters = {name: state["masters"][name] for name in engine.weights.masters() or {}}
    engine.load_state_dict(state["engine"], own, masters)
    session.tell_delay()  # before the optimizer's state is loaded: it keeps what it needs under its delay
    engine.runner.seed = session.seed = int(state["seed"])


def _partition(session: PipelineSession) -> Partition:
    assert session.partition is not None, "cut() comes before a checkpoint"
    return session.partition


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
    _check_stages(mesh, len(stages))
    return dict(stages[mesh.stage])


def _check_stages(mesh: Mesh, saved: int) -> None:
    if saved != mesh.num_stages:
        raise ConfigurationError(
            f"the checkpoint was written by {saved} stages, this run has {mesh.num_stages}: resuming with another"
            f" number of stages is not supported yet; use devices={saved * mesh.num_replicas}"
        )


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor of a nested state to a device."""
    return map_tensors(lambda tensor: tensor.to(device), tree)
