"""Whether a checkpoint is what was written, before anything is taken from it."""

from __future__ import annotations

from typing import Any

from lightning_asyncpp.pipeline.ranks.agreement import agree_on_error
from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.storage.checkpoint_io import DurableCheckpointIO
from lightning_asyncpp.storage.errors import StorageError
from lightning_asyncpp.storage.paths import local_path
from lightning_asyncpp.storage.reading import damages


def check_whole(path: Any, files: Any, mesh: Mesh | None) -> None:
    """Compare a checkpoint with its checksums; a collective call, in which ranks divide the files among themselves.

    Args:
        path: of the checkpoint; what is in no file system is not looked at, nor what is not there.
        files: what will read it; what another than ours reads is not looked at.
        mesh: the ranks; None: this process alone looks at all of it.

    Raises:
        StorageError: it is damaged; on ranks that found nothing a quotation.
    """
    if mesh is None:
        _check_part(path, files, 0, 1)
        return
    error: Exception | None = None
    try:
        _check_part(path, files, mesh.rank, mesh.world_size)
    except Exception as caught:
        error = caught
    agree_on_error(mesh, error)


def _check_part(path: Any, files: Any, part: int, parts: int) -> None:
    local = local_path(path)
    if not isinstance(files, DurableCheckpointIO) or local is None or not local.exists():
        return
    if problems := damages(local, part=part, parts=parts):
        raise StorageError("; ".join(problems))
