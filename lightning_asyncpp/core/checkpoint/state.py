"""The state of a pipeline: what each stage holds, by names of the model, and how any other pipeline takes it up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_asyncpp.core.checkpoint.gathering import gather
from lightning_asyncpp.core.cut.ties import check_copies, keep_once
from lightning_asyncpp.core.ranks.agreement import agree_on_error
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.stage_optimizer import name_of
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.storage.folders import merged

PIPELINE = "pipeline"
"""Entry of a checkpoint in which a pipeline keeps what is neither weights nor optimizer."""
OLDER, MASTERS = "older_weights", "masters"


def stage_model_state(session: PipelineSession, own: Mapping[str, Any]) -> dict[str, Any]:
    """This stage's part of the model's ``state_dict``: weights that gradients are taken at, where there are masters.

    Args:
        session: the pipeline.
        own: what the module says: what was cut, or the one around it.
    """
    assert session.stage is not None
    weights = session.running().weights.shown()
    shown = {name: weights[use] for name, use in session.stage.names.items() if use in weights}
    return {name: shown.get(name, value) for name, value in own.items()}


def stage_pipeline_state(session: PipelineSession) -> dict[str, Any]:
    """What a checkpoint of a drained pipeline holds beyond weights and optimizers, and how the pipeline runs.

    The older weight version belongs to it: the mini-batch after the checkpoint runs on it.
    """
    engine, partition = session.running(), session.partition
    settings = engine.settings
    assert partition is not None, "cut() comes before a checkpoint"
    return {
        "num_stages": settings.num_stages,
        "data_parallel_size": engine.mesh.num_replicas,
        "partition": list(partition.counts),
        "micro_batches": settings.micro_batches,
        "lookahead": settings.lookahead,
        "delay": settings.delay,
        "staleness": settings.staleness,
        "slack": settings.slack,
        "weight_dtype": settings.weight_dtype,
        "seed": engine.runner.seed,
        "mini_batch": engine.mini_batch,
        "optimizer": None if session.optimizer is None else name_of(session.optimizer),
        "engine": engine.state_dict(),
        OLDER: engine.weights.older() or {},
        MASTERS: (engine.weights.masters() or {}) if engine.weights.has_masters else {},
    }


def gathered(session: PipelineSession, part: dict[str, Any]) -> dict[str, Any]:
    """What all stages have of it on rank 0, ``part`` on others; a blocking collective on a drained pipeline.

    All names of a shared parameter stand for one tensor then.

    Args:
        session: the pipeline.
        part: of this stage, as the functions above return it.
    """
    mesh = session.running().mesh
    parts = gather(mesh, part, [mesh.rank_of(stage, replica=0) for stage in range(mesh.num_stages)])
    if not parts:
        return part
    whole: dict[str, Any] = merged(parts)
    keep_once(whole, session.whole_model.same)
    for name in (OLDER, MASTERS):
        keep_once(whole.get(name, {}), [tie.names for tie in session.whole_model.ties])
    return whole


def load_model_state(session: PipelineSession, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load this stage's part of a whole model's ``state_dict``; both weight versions become what was loaded.

    Args:
        session: a drained pipeline.
        module: what was cut, or the one around it.
        state: name -> tensor, of the whole one.
        strict: whether the names must agree.

    Raises:
        RuntimeError: they do not, or shapes do not; on every rank.
        ConfigurationError: names of one parameter have different values.
    """
    error: Exception | None = None
    pruned = session.whole_model.pruned
    try:
        check_copies(state, session.whole_model.same)
        with pruned.hidden():
            pruned.load(module, state, strict)
    except (RuntimeError, ConfigurationError) as caught:
        error = caught
    engine = session.running()
    agree_on_error(engine.mesh, error)
    engine.weights.restore(engine.weights.newest, None)


def load_pipeline_state(session: PipelineSession, state: Mapping[str, Any] | None) -> None:
    """Go on where a checkpoint ended; the weights were loaded before. Without a state, both versions are the weights.

    Stages, replicas, micro-batches and the delay may be others than those that wrote it. A weight that had no older
    version there (no delay, the last stage) is its own older version.

    Raises:
        ConfigurationError: the weights are kept in another way.
    """
    engine = session.running()
    if state is None:
        engine.weights.restore(engine.weights.newest, None)
        return
    if state.get("weight_dtype") != (dtype := engine.settings.weight_dtype):
        raise ConfigurationError(
            f"the checkpoint was written with weight_dtype={state.get('weight_dtype')!r}, this run has {dtype!r}: use"
            " the same, or load only the weights: pass the model loaded with load_state_dict, without ckpt_path"
        )
    find = session.whole_model.find
    older = {
        name: tensor if (saved := find(state[OLDER], name)) is None else saved
        for name, tensor in (*engine.weights.parameters.items(), *engine.weights.buffers.items())
    }
    masters = {name: _found(find(state[MASTERS], name), name) for name in engine.weights.masters() or {}}
    has_older = bool(state[OLDER]) and engine.weights.room > 1
    engine.load_state_dict(state["engine"], older if has_older else None, masters)
    session.set_delay()  # before the optimizer's state is loaded: it keeps what it needs under its delay
    session.seed = int(state["seed"])
    engine.set_seed(session.seed)


def rank_to_follow(mesh: Mesh, state: Mapping[str, Any]) -> int:
    """The rank of the pipeline that wrote a checkpoint whose own state this rank takes up.

    The same rank; in a pipeline of other stages or replicas the last stage of its replica, or of the last replica.
    """
    stages, replicas = state["num_stages"], state["data_parallel_size"]
    if (stages, replicas) == (mesh.num_stages, mesh.num_replicas):
        return mesh.rank
    return Mesh(stages, replicas, 0).rank_of(stages - 1, min(mesh.replica, replicas - 1))


def _found(master: Tensor | None, name: str) -> Tensor:
    if master is None:
        raise ConfigurationError(
            f"the checkpoint holds no master of {name}: it was frozen when the checkpoint was written, or the"
            " checkpoint is another model's; train what was trained, or load only the weights: pass the model loaded"
            " with load_state_dict, without ckpt_path"
        )
    return master
