"""How the ranks of a hand-written loop agree to end after the same mini-batch."""

from __future__ import annotations

from lightning_asyncpp.pipeline.session import PipelineSession


class StopMixin:
    """Carries a wish to end in the one message that all ranks exchange about a mini-batch anyway.

    Attributes:
        session: the pipeline.
    """

    session: PipelineSession

    def request_stop(self) -> None:
        """Ask all ranks to end soon; may be called on any rank, at any moment after set-up, in a signal's handler too.

        Before ``setup_optimizers`` it does nothing.
        """
        if self.session.engine is not None:
            self.session.engine.updates.requested.interrupted = True

    @property
    def stop_agreed(self) -> bool:
        """Whether some rank asked to end and all know: it becomes True on all ranks in the same ``optimizer.step()``.

        That is one of the next two mini-batches after :meth:`request_stop`.
        """
        return self.session.engine is not None and self.session.engine.updates.agreed.interrupted
