"""Which batches a rank reads, and how they come to its device: all stages of a replica the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_asyncpp.strategy_parts.stage_loader import AnnouncingLoader, Next, has_placeholder, stage_loader
from lightning_asyncpp.trainer.checkpoint import Progress
from lightning_asyncpp.trainer.launching import Launching

_HOOK = "on_before_batch_transfer"
_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")


class ReplicaBatches(Launching):
    """Deals out loaders' batches by replicas.

    Attributes:
        progress: knows where a run that goes on takes up its loader.
    """

    progress: Progress
    _only_moves_batches = True

    def take_batch_hooks(self, owners: list[Any], until: ExitStack) -> None:
        """Let the hooks that are called with each batch see no placeholder.

        Args:
            owners: the module and the data module, as far as there are any.
            until: gives the hooks back when it is closed.
        """
        # Then what was moved to the device is still on the host.
        self._only_moves_batches = not any(is_overridden(name, of) for name in _TRANSFER_HOOKS for of in owners)
        for owner in owners:
            if owner is not None and is_overridden(_HOOK, owner):
                owner.__dict__[_HOOK] = functools.partial(_unless_placeholder, getattr(owner, _HOOK))
                until.callback(owner.__dict__.pop, _HOOK, None)

    @property
    def is_distributed(self) -> bool:
        """Lightning's question whether samplers must be told the replica."""
        return True

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.session.mesh
        if mesh is None:
            return {"num_replicas": self.session.settings.data_parallel_size, "rank": 0}
        return {"num_replicas": mesh.num_replicas, "rank": mesh.replica}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        engine, trainer = self.session.running(), self.lightning_module.trainer
        mesh, transport = engine.mesh, engine.runner.transport
        needs_data = mesh.is_first or mesh.is_last
        follow = None if transport is None else lambda: Next(transport.follow_loaded())
        loader = stage_loader(dataloader, mesh.num_replicas, mesh.replica, needs_data, follow)
        loader = self.progress.training_loader(loader, trainer) if trainer.training else loader
        if transport is not None and mesh.is_first and mesh.num_stages > 2:
            return AnnouncingLoader(loader, transport.announce_loaded)
        return loader


def _unless_placeholder(hook: Callable[[Any, int], Any], batch: Any, dataloader_idx: int) -> Any:
    return batch if has_placeholder(batch) else hook(batch, dataloader_idx)
