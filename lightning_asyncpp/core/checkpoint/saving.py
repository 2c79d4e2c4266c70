"""Writes the checkpoints of a pipeline: in one file or sharded, at once or while training goes on.

A save is a collective call. What fails on one rank is raised on all: by the save itself, or if it went on in the
background by the next one, by :meth:`CheckpointWriter.settle`, and at the end of the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.checkpoint.gathering import gather_skeletons
from lightning_asyncpp.core.checkpoint.state import facts
from lightning_asyncpp.core.failures.at_exit import AtExit, uncaught
from lightning_asyncpp.core.ranks.agreement import agree_on_error, exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.storage.names import local_path
from lightning_asyncpp.storage.nested import merged
from lightning_asyncpp.storage.sharded import Shard, Target, commit, give_up, new_target, shard_name, write_shard


class Files(Protocol):
    """What writes single files: a ``CheckpointIO`` of Lightning."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any | None = None) -> None:
        """Write one."""


class CheckpointWriter:
    """The saves of one rank.

    Args:
        session: the pipeline whose checkpoints they are.
        sharded: whether every stage writes its part of a folder, instead of rank 0 one file.
        in_background: whether training goes on while files are written; one save at a time.
    """

    def __init__(self, session: PipelineSession, sharded: bool = False, in_background: bool = False) -> None:
        self.session, self.sharded, self.in_background = session, sharded, in_background
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._at_exit: AtExit | None = None  # a script may end without a word

    def save_file(self, content: Mapping[str, Any], path: Any, files: Files, *options: Any) -> None:
        """Write one file on rank 0; a collective call.

        Args:
            content: on rank 0 all of the checkpoint.
            path: of the file.
            files: writes it.
            options: for it.
        """
        self.settle()
        write = _nothing
        if self._mesh.rank == 0:
            if self.in_background:  # the next mini-batch changes them
                content = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), content)
            write = partial(files.save_checkpoint, content, path, *options)
        self._run(lambda mesh, group: _together(mesh, group, write))

    def save_folder(self, path: Any, part: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
        """Write this stage's part of a folder; a collective call.

        Args:
            path: the folder, in a file system that all machines see.
            part: what every stage has a part of.
            beside: what rank 0 adds.

        Raises:
            ConfigurationError: it is in none.
        """
        self.settle()
        mesh, folder = self._mesh, local_path(path)
        if folder is None:
            raise ConfigurationError(
                f"state_dict_type='sharded': {path} is in no file system of this machine; name a folder that all"
                " machines share, or use state_dict_type='full', which one rank writes"
            )
        skeletons, tensors = gather_skeletons(mesh, dict(part), name_of=shard_name)
        # Now, and not in the background: the next mini-batch changes them.
        tensors = {name: tensor.to("cpu", copy=self.in_background) for name, tensor in tensors.items()}
        target = self._agreed_target(mesh, folder)
        if self.in_background:
            beside = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), beside)
        run, about = {**beside, **(merged(skeletons) if skeletons else {})}, facts(self.session)
        self._run(lambda mesh, group: _write_folder(mesh, group, target, tensors, run, about))

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove an older checkpoint, after what is being written now is there."""
        if self._pending and self._executor is not None:
            self._pending.append(self._executor.submit(_after, tuple(self._pending), partial(_quietly, remove)))
        else:
            remove()

    def settle(self) -> None:
        """Wait until what is being saved in the background is there.

        Raises:
            StorageError: a rank could not write its part; every rank raises it, or a quotation.
        """
        pending = list(self._pending)
        self._pending.clear()
        for future in pending:
            future.result()

    def close(self) -> None:
        """End the run.

        Raises:
            StorageError: as for :meth:`settle`.
        """
        try:
            with suppress(
                *((Exception,) if self.session.watch.failure is not None else ())
            ):  # the run ends with its cause
                self.settle()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            if self._at_exit is not None:
                self._at_exit.cancel()
                self._at_exit = None

    def _run(self, job: Callable[[Mesh, dist.ProcessGroup | None], None]) -> None:
        """Do what all ranks do together, here or in the background, where they agree in a group of their own."""
        mesh = self._mesh
        if not self.in_background:
            job(mesh, None)
            return
        group = mesh.group_for_saving(self.session.timeout)
        self._at_exit = self._at_exit or AtExit(partial(_fail_at_exit, self._pending))
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending.append(self._executor.submit(job, mesh, group))

    def _agreed_target(self, mesh: Mesh, folder: Path) -> Target:
        """Where a save goes, chosen on rank 0."""
        chosen: list[Target] = []

        def choose() -> None:
            chosen.append(new_target(folder))

        _together(mesh, None, choose if mesh.rank == 0 else _nothing)
        return Target(*json.loads(exchange(mesh, json.dumps(chosen[0]) if chosen else "")[0]))

    @property
    def _mesh(self) -> Mesh:
        assert self.session.mesh is not None, "checkpoints are saved by a pipeline that is connected"
        return self.session.mesh


def _write_folder(
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    target: Target,
    tensors: Mapping[str, Tensor],
    run: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """Write all shards, and the index when every stage has written its own."""
    own: list[Shard] = []

    def write() -> None:
        own.append(write_shard(target, shard_name(mesh.stage), tensors))

    try:
        _together(mesh, group, write if mesh.replica == 0 else _nothing)
        shards = [Shard(*json.loads(text)) for text in exchange(mesh, json.dumps(own[0]) if own else "", group) if text]
        _together(mesh, group, partial(commit, target, shards, run, about) if mesh.rank == 0 else _nothing)
    except BaseException:
        if mesh.rank == 0:
            give_up(target)
        raise


def _together(mesh: Mesh, group: dist.ProcessGroup | None, write: Callable[[], None]) -> None:
    """Write; what fails on one rank is raised on all."""
    error: Exception | None = None
    try:
        write()
    except Exception as caught:
        error = caught
    agree_on_error(mesh, error, group)


def _after(before: Sequence[Future[None]], action: Callable[[], None]) -> None:
    if all(future.exception() is None for future in before):  # else the older one is the last that there is
        action()


def _fail_at_exit(pending: list[Future[None]]) -> None:
    """The script ends, and no later call raises what the newest save came to."""
    errors = [error for future in pending if (error := future.exception()) is not None]
    for error in errors[:1]:
        sys.stderr.write(f"asyncpp: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        if uncaught() is None:
            os._exit(1)


def _quietly(remove: Callable[[], None]) -> None:
    with suppress(OSError):
        remove()


def _nothing() -> None:
    """There is nothing to do on this rank."""
