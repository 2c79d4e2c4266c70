"""How Lightning's strategies write and read checkpoints of ours: whole or not at all, and without running code."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_asyncpp.storage import is_sharded, load, local_path, remove_sharded, save_file


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
            # Of a URL Lightning would run the code that it holds.
            return super().load_checkpoint(path, map_location, weights_only is not False)
        content: dict[str, Any] = load(local, weights_only)
        return content

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, if it is there."""
        local = local_path(path)
        if local is not None and is_sharded(local):
            remove_sharded(local)
        else:
            super().remove_checkpoint(path)
