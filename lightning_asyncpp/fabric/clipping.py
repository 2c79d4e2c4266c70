"""Gradient clipping that is asked for with a mini-batch and applied with its update, one call later."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_asyncpp.fabric import refusals
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.session import PipelineSession
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
    """The clipping of every mini-batch whose update is outstanding.

    Args:
        session: the pipeline.
    """

    def __init__(self, session: PipelineSession) -> None:
        self._session = session
        self._entries: dict[int, Clipping] = {}

    def record(self, clipping: Clipping) -> None:
        """Clip the gradient of the present mini-batch; a second call of the same kind replaces the first.

        Raises:
            ConfigurationError: it has no batch yet, or both kinds are asked for.
        """
        engine = self._session.running()
        if not engine.accumulating:
            raise ConfigurationError(refusals.NOTHING_TO_CLIP)
        before = self._entries.get(engine.mini_batch)
        if before is not None and before.algorithm != clipping.algorithm:
            raise ConfigurationError(
                f"clip_gradients was called with {before.algorithm} and with {clipping.algorithm} for the same update:"
                " the norm over all stages is that of the gradient before either; use one of them"
            )
        self._entries[engine.mini_batch] = clipping

    def apply(self) -> None:
        """Clip the gradients of the update that is being applied, if that was asked for."""
        clipping = self._entries.get(self._session.updating().mini_batch)
        if clipping is not None:
            clipping.apply(self._session)

    def forget(self, mini_batch: int) -> None:
        """Drop the entry of a mini-batch whose update is done."""
        self._entries.pop(mini_batch, None)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
