"""Gradient clipping that is asked for with a mini-batch and applied with its update, one call later."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_asyncpp.core.foreach import clip_values
from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.errors import ConfigurationError


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
