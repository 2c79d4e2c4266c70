"""Collectives that a module's hooks call: over replicas, as under DDP, and not over stages, which have other layers.

Only the last stage runs ``*_step`` methods to their end, so what a hook does with their results other stages leave out:
a collective of all ranks would wait for them. Among the ranks of one stage, one per replica, nobody waits for another
stage. Lightning's own collectives (a metric's synchronisation, decisions of callbacks) stay those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_asyncpp.errors import PeerLostError, is_noise
from lightning_asyncpp.strategy_parts.mixin import PipelineStrategyMixin
from lightning_asyncpp.trainer import private

T = TypeVar("T")


class Collectives(PipelineStrategyMixin):
    """Comes before Lightning's strategy.

    ``all_gather`` is a user's call wherever it stands. ``reduce``, ``broadcast`` and ``barrier`` are in a hook of the
    module at an epoch's end, :meth:`in_epoch_end`, where Lightning calls none itself.
    """

    lightning_module: LightningModule | None
    _epoch_end = ""

    @contextmanager
    def in_epoch_end(self, hook: str) -> Iterator[None]:
        """A hook of the module runs meanwhile."""
        self._epoch_end = hook
        try:
            yield
        finally:
            self._epoch_end = ""

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of this stage in all replicas, shape (replicas, ...).

        Args:
            tensor: of the same shape in all of them.
            group: another group of ranks, whose tensors are returned then.
            sync_grads: whether gradients flow back.
        """
        if group not in (None, dist.group.WORLD):
            return super().all_gather(tensor, group, sync_grads)
        self._check_collective("all_gather")
        if (own := self._replicas()) is None:
            return torch.stack([tensor if sync_grads else tensor.detach()])
        with self._among_replicas("all_gather"):
            return super().all_gather(tensor, own, sync_grads)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks; in the module's epoch end over the replicas."""
        self._check_collective("reduce")
        if not self._epoch_end or group not in (None, dist.group.WORLD):
            with self.session.watch.collective():
                return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]
        if (own := self._replicas()) is None:
            return tensor
        with self._among_replicas("reduce"):
            return super().reduce(tensor, own, reduce_op)  # type: ignore[misc]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src`` on all ranks; in the module's epoch end its replica's, on this stage."""
        if not self._epoch_end:
            return super().broadcast(obj, src)
        self._check_collective("broadcast")
        if (own := self._replicas()) is None:
            return obj
        objects = [obj]
        mesh = self._mesh
        with self._among_replicas("broadcast"):
            dist.broadcast_object_list(objects, mesh.rank_of(mesh.stage, mesh.replica_of(src)), group=own)
        return objects[0]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; in the module's epoch end for this stage's in all replicas."""
        if not self._epoch_end:
            super().barrier(*args, **kwargs)
            return
        self._check_collective("barrier")
        if (own := self._replicas()) is not None:
            with self._among_replicas("barrier"):
                dist.barrier(group=own)

    def _replicas(self) -> dist.ProcessGroup | None:
        groups = self._mesh.groups
        return None if groups is None else groups.data_parallel

    @contextmanager
    def _among_replicas(self, name: str) -> Iterator[None]:
        """Say which call was waited for in vain.

        Raises:
            PeerLostError: a replica has not made it.
        """
        with self.session.watch.collective():
            try:
                yield
            except RuntimeError as error:
                if not (isinstance(error, PeerLostError) or is_noise(error)):
                    raise
                module = self.lightning_module
                hook = self._epoch_end or (private.current_hook(module) if module is not None else None) or "a hook"
                raise PeerLostError(
                    f"{name} in {hook} waited for the other replicas in vain: every replica has to make the call, with"
                    f" tensors of the same shape (this is stage {self._mesh.stage} of replica {self._mesh.replica}); or"
                    " one has failed: then the first cause is the first error that another rank printed"
                ) from error
