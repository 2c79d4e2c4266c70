"""Save a pipeline's state under the whole model's names, and load it into a pipeline with any number of stages.

A full checkpoint is one file: rank 0, the last stage of the first replica, gathers the other stages' state and writes
it. A sharded checkpoint is a folder, into which each stage writes its state. Saving happens at once or in the
background.

A save is a collective call; an error on one rank is raised on all ranks. A save in the background raises its error in
the next save, in :meth:`CheckpointWriter.settle`, or at the end of the run.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.core.cut.ties import check_copies, keep_once
from lightning_asyncpp.core.first_cause import AtExit, uncaught
from lightning_asyncpp.core.host_copies import as_bytes, pieces_on_host
from lightning_asyncpp.core.ranks.agreement import all_gather_object, call_and_agree, in_same_call
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.stage_optimizer import name_of
from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.errors import ConfigurationError, lost_peers
from lightning_asyncpp.storage import Target, commit, give_up, local_path, merged, new_target, write_part

_TAG = 7
_SMALL_BYTES = 2**14  # smaller tensors share a message, since each message takes a millisecond


def gather(mesh: Mesh, part: Any, ranks: Sequence[int]) -> list[Any]:
    """Gather nested containers of some ranks on rank 0's host; return [] on other ranks.

    This is a blocking collective of all ranks. Large tensors are sent in pieces, so no rank holds a part twice. In a
    single process, the part is returned as it is.

    Args:
        mesh: mesh of ranks.
        part: containers of this rank.
        ranks: ranks whose parts are gathered, in the order of the result.

    Raises:
        ProtocolError: another rank makes a different call.
    """
    if mesh.groups is None:
        return [part]
    in_same_call(mesh, "gathers the state for a checkpoint")
    if mesh.rank == 0:
        return [_receive(mesh.groups.host, rank) if rank else on_host(part) for rank in ranks]
    if mesh.rank in ranks:
        _send(mesh.groups.host, part)
    return []


def on_host(content: Any, copy: bool = False) -> Any:
    """Return the same containers with their tensors on the host; a tensor that occurs twice stays one tensor.

    Args:
        content: nested containers.
        copy: whether to copy tensors that are on the host already.
    """
    known: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            # Views are copied, since torch would save a view's whole storage.
            is_part = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes
            known[id(tensor)] = tensor.detach().to("cpu", copy=copy or is_part)
        return known[id(tensor)]

    return map_tensors(moved, content)


def _send(group: dist.ProcessGroup, part: Any) -> None:
    """Send a part to rank 0: first its containers, with meta tensors for large tensors, then the large tensors."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            is_small = tensor.nbytes <= _SMALL_BYTES
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            known[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True) if is_small else empty
        return known[id(tensor)][1]

    file = io.BytesIO()
    torch.save(map_tensors(stand_in, part), file)
    text = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    with lost_peers():
        dist.send(torch.tensor([len(text)]), 0, group=group, tag=_TAG)
        for tensor in (text, *(tensor for tensor, other in known.values() if other.is_meta)):
            for piece in pieces_on_host(as_bytes(tensor)):
                dist.send(piece, 0, group=group, tag=_TAG)


def _receive(group: dist.ProcessGroup, rank: int) -> Any:
    """Receive a part from a rank; see :func:`_send`."""
    received: dict[int, Tensor] = {}

    def with_content(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in received:
            received[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            fill(received[id(tensor)])
        return received[id(tensor)]

    def fill(tensor: Tensor) -> None:
        for piece in pieces_on_host(as_bytes(tensor)):  # the pieces are views of this memory, not copies
            dist.recv(piece, rank, group=group, tag=_TAG)

    with lost_peers():
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=group, tag=_TAG)
        fill(text := torch.empty(int(size), dtype=torch.uint8))
        # To the CPU, since this machine may not have the sender's device. Ranks trust each other.
        part = torch.load(io.BytesIO(text.numpy().data), map_location="cpu", weights_only=False)
        return map_tensors(with_content, part)


PIPELINE = "pipeline"
"""Key of a checkpoint's entry with the result of :func:`stage_pipeline_state`."""
OLDER, MASTERS = "older_weights", "masters"


def stage_model_state(session: PipelineSession, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return this stage's part of the model's ``state_dict``, with weights in place of their masters.

    Masters are the fp32 weights that the optimizer updates with ``weight_dtype``.

    Args:
        session: the pipeline.
        own: ``state_dict`` of the cut module, or of the module that contains it.
    """
    assert session.stage is not None
    weights = session.running().weights.for_evaluation() or {}
    shown = {name: weights[use].detach() for name, use in session.stage.names.items() if use in weights}
    return {name: shown.get(name, value) for name, value in session.whole_model.pruned.without_removed(own).items()}


def stage_pipeline_state(session: PipelineSession) -> dict[str, Any]:
    """Return a drained pipeline's settings and state, without the newest weights and the optimizer's state.

    Drained: nothing is in flight, and all updates are applied. The state includes the older weight version, on which
    the next mini-batch runs, or (with ``staleness="least"``) its first microbatches do.
    """
    engine, partition = session.running(), session.partition
    settings = engine.settings
    assert partition is not None, "call cut() before a checkpoint"
    return {
        "num_stages": settings.num_stages,
        "data_parallel_size": engine.mesh.num_replicas,
        "partition": list(partition.counts),
        "microbatches": settings.microbatches,
        "lookahead": settings.lookahead,
        "delay": settings.delay,
        "staleness": settings.staleness,
        "slack": settings.slack,
        "synchronous_start": settings.synchronous_start,
        "weight_dtype": settings.weight_dtype,
        "seed": engine.runner.seed,
        "mini_batch": engine.mini_batch,
        "optimizer": None if session.optimizer is None else name_of(session.optimizer),
        "engine": engine.state_dict(),
        OLDER: engine.weights.older(),
        MASTERS: engine.weights.masters(),
    }


def gathered(session: PipelineSession, part: dict[str, Any]) -> dict[str, Any]:
    """Merge the parts of all stages on rank 0; return ``part`` on other ranks.

    This is a blocking collective on a drained pipeline. In the result, all names of a shared parameter refer to one
    tensor.

    Args:
        session: the pipeline.
        part: this stage's part, with results of :func:`stage_model_state` and :func:`stage_pipeline_state`.
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
    """Load this stage's part of a whole model's ``state_dict`` into both weight versions.

    Args:
        session: a drained pipeline.
        module: the cut module, or the module that contains it.
        state: ``state_dict`` of the whole module.
        strict: whether names must match exactly.

    Raises:
        RuntimeError: names or shapes do not match; raised on every rank.
        ConfigurationError: two names of one shared parameter have different values.
    """
    pruned, engine = session.whole_model.pruned, session.running()

    def load() -> None:
        check_copies(state, session.whole_model.same)
        with pruned.showing(False):
            pruned.load(module, state, strict)

    call_and_agree(engine.mesh, load)
    engine.weights.restore(engine.weights.newest)


def load_pipeline_state(session: PipelineSession, state: Mapping[str, Any] | None) -> None:
    """Load the pipeline's state from a checkpoint whose weights are loaded already.

    The numbers of stages, replicas and microbatches, and the delay, may differ from the checkpoint's. If the checkpoint
    has no older version of a weight, or if ``state`` is None, the weight's newest version is used as its older version.

    Raises:
        ConfigurationError: the checkpoint was written with another ``weight_dtype``.
    """
    engine = session.running()
    if state is None:
        engine.weights.restore(engine.weights.newest)
        return
    if state.get("weight_dtype") != (dtype := engine.settings.weight_dtype):
        raise ConfigurationError(
            f"the checkpoint was written with weight_dtype={state.get('weight_dtype')!r}, but this run has {dtype!r}:"
            " use the same weight_dtype, or load only the weights with load_state_dict, without ckpt_path"
        )
    find = session.whole_model.find
    older = {
        name: tensor if (saved := find(state[OLDER], name)) is None else saved
        for name, tensor in (*engine.weights.parameters.items(), *engine.weights.buffers.items())
    }
    found = {name: find(state[MASTERS], name) for name in engine.weights.masters()}
    masters = {name: master for name, master in found.items() if master is not None}  # frozen parameters had no masters
    engine.load_state_dict(state["engine"], older if state[OLDER] else {}, masters)
    session.seed = int(state["seed"])
    for runner in (engine.runner, *(stage.runner for stage in engine.stages)):
        runner.seed = session.seed


def rank_to_follow(mesh: Mesh, state: Mapping[str, Any]) -> int:
    """Return the rank whose rank-specific state in a checkpoint this rank loads.

    If the checkpoint has as many stages and replicas as this run, this is the rank itself. Otherwise it is the rank of
    the last stage in the checkpoint's replica with this replica's number or, if there is none, in its last replica.
    """
    stages, replicas = state["num_stages"], state["data_parallel_size"]
    if (stages, replicas) == (mesh.num_stages, mesh.num_replicas):
        return mesh.rank
    return Mesh(stages, replicas, 0).rank_of(stages - 1, min(mesh.replica, replicas - 1))


class CheckpointWriter:
    """Writer of a rank's checkpoints.

    Args:
        session: the pipeline.
        sharded: whether each stage writes its part into a folder, instead of rank 0 writing one file.
        in_background: whether training goes on while files are written; one save at a time.
    """

    def __init__(self, session: PipelineSession, sharded: bool = False, in_background: bool = False) -> None:
        self.session, self.sharded, self.in_background = session, sharded, in_background
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._at_exit: AtExit | None = None  # a script may end without close()

    def collected(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the state that this rank writes, given its stage's part; a collective call."""
        return part if self.sharded else gathered(self.session, part)

    def save(self, path: Any, content: dict[str, Any], write_file: Callable[[dict[str, Any]], None]) -> None:
        """Write a checkpoint; a collective call.

        Args:
            path: path of a full checkpoint's file, or of a sharded checkpoint's folder, which all machines share.
            content: state of this rank. A full checkpoint has rank 0's content only. A sharded checkpoint has the
                content of each stage of the first replica; rank 0's includes entries that belong to no stage.
            write_file: function that writes a full checkpoint.

        Raises:
            ConfigurationError: a sharded checkpoint cannot be written to the file system of ``path``.
            StorageError: the checkpoint cannot be written.
        """
        self.settle()
        mesh = self.session.connected()
        if (self.sharded and mesh.replica == 0) or (self.in_background and mesh.rank == 0):
            content = on_host(content, copy=self.in_background)  # the next mini-batch changes the tensors
        if self.sharded:
            target = self._agreed_target(path)
            self._run(lambda group: _write_folder(mesh, group, target, content))
        else:
            write = partial(write_file, content) if mesh.rank == 0 else _nothing
            self._run(lambda group: call_and_agree(mesh, write, group))

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove an older checkpoint once all pending saves have succeeded; keep it if one fails."""
        if self._pending and self._executor is not None:
            self._pending.append(self._executor.submit(_after, tuple(self._pending), remove))
        else:
            remove()

    def settle(self) -> None:
        """Wait until saves in the background are complete.

        Raises:
            StorageError: a rank could not write its part; the other ranks' errors quote this error.
        """
        pending = list(self._pending)
        self._pending.clear()
        for future in pending:
            future.result()

    def close(self) -> None:
        """Complete the saves and stop writing.

        Raises:
            StorageError: see :meth:`settle`.
        """
        try:
            # An error of a save must not hide the error of a failed run.
            with suppress(*((Exception,) if self.session.watch.failure is not None else ())):
                self.settle()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            if self._at_exit is not None:
                self._at_exit.cancel()
                self._at_exit = None

    def _agreed_target(self, path: Any) -> Target:
        """Return the target of a sharded save, chosen on rank 0."""
        mesh, folder = self.session.connected(), local_path(path)
        if folder is None:
            raise ConfigurationError(
                f"state_dict_type='sharded': {path} is not on a local file system; name a folder that all"
                " machines share, or use state_dict_type='full', which one rank writes"
            )
        chosen: list[Target] = []
        call_and_agree(mesh, (lambda: chosen.append(new_target(folder))) if mesh.rank == 0 else _nothing)
        return all_gather_object(mesh, chosen)[0][0]

    def _run(self, job: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Run a collective job at once, or in the background in a separate process group."""
        if not self.in_background:
            job(None)
            return
        group = self.session.connected().group_for_saving(self.session.timeout)
        self._at_exit = self._at_exit or AtExit(partial(_fail_at_exit, self._pending))
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending.append(self._executor.submit(job, group))


def _write_folder(mesh: Mesh, group: dist.ProcessGroup | None, target: Target, part: Mapping[str, Any]) -> None:
    """Write this stage's part; when every stage has written its part, write the index."""
    own: list[tuple[str, int]] = []
    try:
        writes = mesh.replica == 0
        call_and_agree(mesh, (lambda: own.append(write_part(target, mesh.stage, part))) if writes else _nothing, group)
        files = dict(sorted(file for written in all_gather_object(mesh, own, group) for file in written))
        call_and_agree(mesh, partial(commit, target, files) if mesh.rank == 0 else _nothing, group)
    except BaseException:
        if mesh.rank == 0:
            give_up(target)
        raise


def _after(before: tuple[Future[None], ...], remove: Callable[[], None]) -> None:
    if all(future.exception() is None for future in before):  # after a failed save, keep the older checkpoint
        with suppress(OSError):
            remove()


def _fail_at_exit(pending: list[Future[None]]) -> None:
    """Print an error of a pending save when the script ends, and make the exit code nonzero."""
    errors = [error for future in pending if (error := future.exception()) is not None]
    for error in errors[:1]:
        sys.stderr.write(f"asyncpp: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        if uncaught() is None:
            os._exit(1)


def _nothing() -> None:
    """Do nothing: this rank takes part in a collective without work."""
