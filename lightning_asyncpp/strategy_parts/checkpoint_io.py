"""How Lightning's strategies write and read checkpoints of ours: whole or not at all, and without running code.

Before anything is taken from one, it is compared with its checksums.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_asyncpp.pipeline.ranks.agreement import agree_on_error
from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.storage.loading import damages, load
from lightning_asyncpp.storage.names import StorageError, local_path
from lightning_asyncpp.storage.sharded import is_sharded, remove_sharded
from lightning_asyncpp.storage.whole import save_file


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes single files so that a crash at any moment leaves the one before, and reads single files and sharded ones.

    What is no path of a file system (``s3://...``) goes the way of :class:`TorchCheckpointIO`.
    """

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
        local = local_path(path)
        if local is None or not local.exists():
            return super().load_checkpoint(path, map_location, weights_only)
        content: dict[str, Any] = load(local, weights_only)
        return content

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a folder, if it is there."""
        local = local_path(path)
        if local is not None and is_sharded(local):
            remove_sharded(local)
        else:
            super().remove_checkpoint(path)


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
