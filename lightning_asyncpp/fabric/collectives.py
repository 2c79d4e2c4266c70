"""Fabric's collectives, which must not be called where only one stage would join."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_asyncpp.pipeline.session import PipelineSession


class GuardedCollectives(DDPStrategy):
    """Refuses collectives inside the user's step, and after a failure, instead of waiting for ranks that do not join.

    Attributes:
        session: the pipeline.
    """

    session: PipelineSession

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._check_collective("barrier")
        super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._check_collective("broadcast")
        return super().broadcast(obj, src)

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        self._check_collective("all_reduce")
        return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._check_collective("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def _check_collective(self, name: str) -> None:
        self.session.check_collective(name, "step_fn", "out of step_fn")
