"""Gradient clipping that is asked for with a mini-batch and applied with its update, one call later."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.strategies.strategy import Strategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.fabric.refusals import NOTHING_TO_CLIP
from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.host_copies import Reading
from lightning_asyncpp.pipeline.session import PipelineSession
from lightning_asyncpp.pipeline.updates.clipping import check_norm_type, clip_values


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


@dataclass
class MiniBatchNote:
    """What the loop did for a mini-batch that its update, one call later, must know of.

    Attributes:
        clipping: of its gradient; None for none.
        nan_places: of each of its batches the first micro-batch whose loss is NaN, from 1; or 0.
    """

    clipping: Clipping | None = None
    nan_places: list[Reading] = field(default_factory=list)

    def clip(self, clipping: Clipping) -> None:
        """Note a clipping; a second one of the same kind replaces the first.

        Raises:
            ConfigurationError: both kinds are asked for.
        """
        before = self.clipping
        if before is not None and before.algorithm != clipping.algorithm:
            raise ConfigurationError(
                f"clip_gradients was called with {before.algorithm} and with {clipping.algorithm} for the same update:"
                " the norm over all stages is that of the gradient before either; use one of them"
            )
        self.clipping = clipping


class ClippingMixin(Strategy):
    """Notes what is to be clipped; comes before the strategy that it is mixed into."""

    _note: MiniBatchNote  # of the mini-batch that is open

    @abstractmethod
    def _trained_engine(self, caller: str) -> Engine:
        """The engine, if an optimizer is set up."""

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
        self._clip("max_norm", float(max_norm))

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip every element of the gradient of this mini-batch, when its update is applied."""
        self._clip("clip_val", float(clip_val))

    def _clip(self, algorithm: str, limit: float) -> None:
        if not self._trained_engine("fabric.clip_gradients()").accumulating:
            raise ConfigurationError(NOTHING_TO_CLIP)
        self._note.clip(Clipping(algorithm, limit))
