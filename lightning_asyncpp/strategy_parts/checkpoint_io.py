"""How Lightning's strategies write and read checkpoints of ours: whole or not at all, and without running code.

Before anything is taken from one, it is compared with its checksums, and ranks make sure that it is the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_asyncpp.core.ranks.agreement import agree_on_error, exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import StorageError, local_path
from lightning_asyncpp.storage.opened import Opened, open_checkpoint
from lightning_asyncpp.storage.removal import is_checkpoint
from lightning_asyncpp.storage.sharded import is_sharded, remove_sharded
from lightning_asyncpp.storage.whole import save_file

_PAUSES = (0.0, 0.0, 0.1, 0.3, 1.0)  # before each attempt to open one together, in seconds
_FAILED = "failed"


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes single files so that a crash at any moment leaves the one before, and reads single files and sharded ones.

    What is no path of a file system (``s3://...``) goes the way of :class:`TorchCheckpointIO`.
    """

    _held: Opened | None = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a file.

        Raises:
            StorageError: it cannot be written; what had its name is intact.
        """
        if storage_options is None and (local := local_path(path)) is not None:
            save_file(checkpoint, local)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, or a folder that every stage wrote its part of; tensors are on the host.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it is none, is damaged, or holds code and ``weights_only`` is not False.
        """
        local, held = local_path(path), self._held
        if held is not None and held.path == local:
            content: dict[str, Any] = held.load(weights_only)
        elif local is None or not local.exists():
            # Of a URL Lightning would run the code that it holds.
            content = super().load_checkpoint(path, map_location, weights_only is not False)
        else:
            content = load(local, weights_only)
        return content

    @contextmanager
    def holding(self, checkpoint: Opened) -> Iterator[None]:
        """Read this one where its path is asked for, whatever has its name by then."""
        self._held = checkpoint
        try:
            yield
        finally:
            self._held = None

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, if it is there; what is none stays, with a warning: its name came from another file."""
        local = local_path(path)
        if local is not None and local.exists() and not is_checkpoint(local):
            rank_zero_warn(f"{local} is not removed: it is no checkpoint")
        elif local is not None and is_sharded(local):
            remove_sharded(local)
        else:
            super().remove_checkpoint(path)


class Ranks(NamedTuple):
    """How those who read a checkpoint together agree; both calls are collective.

    Attributes:
        exchange: gives every rank the text of every rank.
        agree: raises on every rank, if one has an error.
        part: which files this rank compares with their checksums, where they are divided.
        parts: among how many.
    """

    exchange: Callable[[str], list[str]]
    agree: Callable[[Exception | None], None]
    part: int = 0
    parts: int = 1


def ranks_of(mesh: Mesh | None) -> Ranks:
    """The ranks of a pipeline, which divide the files among themselves; None: this process is alone."""
    if mesh is None:
        return _readers(lambda text: [text])
    return Ranks(partial(exchange, mesh), partial(agree_on_error, mesh), mesh.rank, mesh.world_size)


def processes_of(strategy: Any) -> Ranks:
    """The processes of DDP, each of which compares all files."""

    def gather(text: str) -> list[str]:
        if strategy.world_size == 1 or not torch.distributed.is_initialized():
            return [text]
        texts: list[Any] = [None] * strategy.world_size
        torch.distributed.all_gather_object(texts, text)
        return texts

    return _readers(gather)


@contextmanager
def held_whole(path: Any, files: Any, ranks: Ranks) -> Iterator[None]:
    """Hold a checkpoint open that was compared with its checksums, and have ``files`` read this very one; collective.

    A run may replace it at any moment: ranks make sure that they hold the same save of it.

    Args:
        path: of the checkpoint; what is in no file system is not looked at, nor what is not there.
        files: what will read it; what another than ours reads is not looked at.
        ranks: who reads it.

    Raises:
        StorageError: it is damaged, or replaced again and again; on ranks that found nothing a quotation.
    """
    checkpoint = _opened_together(path, files, ranks)
    if checkpoint is None:
        yield
        return
    with closing(checkpoint), files.holding(checkpoint):
        error: Exception | None = None
        try:
            if problems := checkpoint.damages(part=ranks.part, parts=ranks.parts):
                raise StorageError("; ".join(problems))
        except Exception as caught:
            error = caught
        ranks.agree(error)
        yield


def _opened_together(path: Any, files: Any, ranks: Ranks) -> Opened | None:
    """The same save on all ranks; None where there is nothing that could be compared."""
    said: list[str] = []
    for pause in _PAUSES:
        time.sleep(pause)
        checkpoint, error = _tried(path, files)
        said = ranks.exchange(checkpoint.identity if checkpoint else _FAILED if error else "")
        if len(set(said)) == 1 and error is None:
            return checkpoint
        if checkpoint is not None:
            checkpoint.close()
        if _FAILED in said:
            ranks.agree(error)
    found = ", ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in enumerate(said))
    raise StorageError(
        f"the checkpoint {path} is being replaced by a run: ranks read different saves of it; copy it, or name one that"
        f" stays ({found})"
    )


def _tried(path: Any, files: Any) -> tuple[Opened | None, Exception | None]:
    try:
        local = local_path(path)
        if not isinstance(files, DurableCheckpointIO) or local is None or not local.exists():
            return None, None
        return open_checkpoint(local), None
    except Exception as error:
        return None, error


def _readers(gather: Callable[[str], list[str]]) -> Ranks:
    def agree(error: Exception | None) -> None:
        texts = gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if others := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise StorageError("; ".join(others))

    return Ranks(gather, agree)
