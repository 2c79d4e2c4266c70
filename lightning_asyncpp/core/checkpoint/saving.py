"""Writes the checkpoints of a pipeline: in one file or sharded, at once or while training goes on.

A save is a collective call. What fails on one rank is raised on all: by the save itself, or if it went on in the
background by the next one, by :meth:`CheckpointWriter.settle`, and at the end of the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_asyncpp.core.checkpoint.gathering import on_host
from lightning_asyncpp.core.checkpoint.state import gathered
from lightning_asyncpp.core.first_cause import AtExit, uncaught
from lightning_asyncpp.core.ranks.agreement import agree_on_error, exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.storage.files import local_path
from lightning_asyncpp.storage.folders import Target, commit, give_up, new_target, write_part


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

    def collected(self, part: dict[str, Any]) -> dict[str, Any]:
        """What this rank's content of a checkpoint has of a state, of which ``part`` is this stage's; collective."""
        return part if self.sharded else gathered(self.session, part)

    def save(self, path: Any, content: dict[str, Any], write_file: Callable[[dict[str, Any]], None]) -> None:
        """Write a checkpoint; a collective call.

        Args:
            path: of the file; of a sharded one the folder, in a file system that all machines see.
            content: of this rank. In one file comes what rank 0 has; sharded what the stages of the first replica have,
                of which rank 0 adds what is no stage's.
            write_file: writes it, if it is one file.

        Raises:
            ConfigurationError: there is no such file system.
            StorageError: it cannot be written.
        """
        self.settle()
        mesh = self._mesh
        if (self.sharded and mesh.replica == 0) or (self.in_background and mesh.rank == 0):
            content = on_host(content, copy=self.in_background)  # the next mini-batch changes them
        if self.sharded:
            target = self._agreed_target(path)
            self._run(lambda group: _write_folder(mesh, group, target, content))
        else:
            write = partial(write_file, content) if mesh.rank == 0 else _nothing
            self._run(lambda group: _together(mesh, group, write))

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove an older checkpoint, after what is being written now is there."""
        if self._pending and self._executor is not None:
            self._pending.append(self._executor.submit(_after, tuple(self._pending), remove))
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
            # A run that failed ends with its cause.
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
        """Where a sharded save goes, chosen on rank 0."""
        mesh, folder = self._mesh, local_path(path)
        if folder is None:
            raise ConfigurationError(
                f"state_dict_type='sharded': {path} is in no file system of this machine; name a folder that all"
                " machines share, or use state_dict_type='full', which one rank writes"
            )
        chosen: list[Target] = []
        _together(mesh, None, (lambda: chosen.append(new_target(folder))) if mesh.rank == 0 else _nothing)
        return Target(*json.loads(exchange(mesh, json.dumps(chosen[0]) if chosen else "")[0]))

    def _run(self, job: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Do what all ranks do together, here or in the background, where they agree in a group of their own."""
        if not self.in_background:
            job(None)
            return
        group = self._mesh.group_for_saving(self.session.timeout)
        self._at_exit = self._at_exit or AtExit(partial(_fail_at_exit, self._pending))
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending.append(self._executor.submit(job, group))

    @property
    def _mesh(self) -> Mesh:
        assert self.session.mesh is not None, "checkpoints are saved by a pipeline that is connected"
        return self.session.mesh


def _write_folder(mesh: Mesh, group: dist.ProcessGroup | None, target: Target, part: Mapping[str, Any]) -> None:
    """Write all parts, and the index when every stage has written its own."""
    own: list[tuple[str, int]] = []
    try:
        writes = mesh.replica == 0
        _together(mesh, group, (lambda: own.append(write_part(target, mesh.stage, part))) if writes else _nothing)
        by_rank = [json.loads(text) for text in exchange(mesh, json.dumps(own), group)]
        files = dict(sorted(file for written in by_rank for file in written))
        _together(mesh, group, partial(commit, target, files) if mesh.rank == 0 else _nothing)
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


def _after(before: tuple[Future[None], ...], remove: Callable[[], None]) -> None:
    if all(future.exception() is None for future in before):  # else the older one is the last that there is
        with suppress(OSError):
            remove()


def _fail_at_exit(pending: list[Future[None]]) -> None:
    """The script ends, and no later call raises what the newest save came to."""
    errors = [error for future in pending if (error := future.exception()) is not None]
    for error in errors[:1]:
        sys.stderr.write(f"asyncpp: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        if uncaught() is None:
            os._exit(1)


def _nothing() -> None:
    """There is nothing to do on this rank."""
