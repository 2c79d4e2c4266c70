"""Gradient clipping that is asked for with a mini-batch and applied with its update, one call later."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from lightning.fabric.strategies.strategy import Strategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.fabric import refusals
from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.session import PipelineSession, check_norm_type
from lightning_asyncpp.pipeline.updates.update import clip_values


@dataclass(frozen=True)
class Clipping:
    """What ``fabric.clip_gradients`` asked for.

    Attributes:
        algorithm: ``"max_norm"`` for the 2-norm over all stages, ``"clip_val"`` for every element alone.
        limit: the largest norm, or the largest absolute value.
    """

    algorithm: str
    limit: float

    def apply(self, session: PipelineSession) -> None:
        """Clip the gradients of the update that is being applied."""
        if self.algorithm == "max_norm":
            session.clip(self.limit)
        else:
            clip_values(session.running().weights.parameters.values(), self.limit)


class ClippingBook:
    """The clipping of every mini-batch whose update is outstanding."""

    def __init__(self) -> None:
        self._entries: dict[int, Clipping] = {}

    def record(self, mini_batch: int, clipping: Clipping) -> None:
        """Clip the gradient of ``mini_batch``; a second call of the same kind replaces the first.

        Raises:
            ConfigurationError: both kinds are asked for.
        """
        before = self._entries.get(mini_batch)
        if before is not None and before.algorithm != clipping.algorithm:
            raise ConfigurationError(
                f"clip_gradients was called with {before.algorithm} and with {clipping.algorithm} for the same update:"
                " the norm over all stages is that of the gradient before either; use one of them"
            )
        self._entries[mini_batch] = clipping

    def get(self, mini_batch: int) -> Clipping | None:
        """The clipping of a mini-batch, if any was asked for."""
        return self._entries.get(mini_batch)

    def forget(self, mini_batch: int) -> None:
        """Drop the entry of a mini-batch whose update is done."""
        self._entries.pop(mini_batch, None)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()


class ClippingMixin(Strategy):
    """Gives a strategy that holds a session ``fabric.clip_gradients``; comes before the strategy it is mixed into.

    Attributes:
        session: the pipeline.
    """

    session: PipelineSession
    _clippings: ClippingBook

    @abstractmethod
    def _trained_engine(self, caller: str) -> Engine:
        """The engine, if there is an optimizer."""

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Clip the gradient of this mini-batch to a 2-norm over all stages, when its update is applied.

        Returns:
            ``None``: the norm is known one mini-batch later, as ``gradient_norm``.
        """
        check_norm_type(float(norm_type))
        self._record(Clipping("max_norm", float(max_norm)))

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip every element of the gradient of this mini-batch, when its update is applied."""
        self._record(Clipping("clip_val", float(clip_val)))

    def _record(self, clipping: Clipping) -> None:
        engine = self._trained_engine("fabric.clip_gradients()")
        if not engine.accumulating:
            raise ConfigurationError(refusals.NOTHING_TO_CLIP)
        self._clippings.record(engine.mini_batch, clipping)
