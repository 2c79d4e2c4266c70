"""How a session fails: what its ranks were told, what later calls raise, and what ends their waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.errors import PeerLostError, is_noise, peer_lost
from lightning_asyncpp.pipeline.failures import background
from lightning_asyncpp.pipeline.failures.guard import Guard
from lightning_asyncpp.pipeline.failures.hang_up import hang_up, hang_up_soon, leave_default_group
from lightning_asyncpp.pipeline.ranks.mesh import GRACE_SECONDS, Mesh
from lightning_asyncpp.pipeline.wire.transport import Transport


class FailingSession:
    """What a session does when one of its ranks fails.

    Args:
        heartbeat: seconds without a sign of life after which a rank is gone; ``None``: nobody watches.
    """

    def __init__(self, heartbeat: float | None) -> None:
        self.mesh: Mesh | None = None
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.guard = Guard(heartbeat, self)
        self._unheard: PeerLostError | None = None  # a failure of another rank that this one's script does not know

    def running(self) -> Engine:
        """The engine.

        Raises:
            PeerLostError: another rank failed, or is gone.
            RuntimeError: the pipeline was not started, or failed before: nobody would answer.
        """
        if self._unheard is not None:
            raise self._unheard
        if self.failure is not None:
            raise RuntimeError(
                "the pipeline failed and its ranks no longer answer each other:"
                f" {type(self.failure).__name__}: {self.failure}"
            ) from self.failure
        if self.engine is None:
            error = sys.exc_info()[1]  # which one of Lightning's callbacks that save on an exception would hide
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            raise RuntimeError(f"the pipeline is not set up yet{why}")
        return self.engine

    def fail(self, error: BaseException) -> None:
        """Remember the first failure: from now on every collective of this session raises, soon on the others too.

        An error that comes from another rank's is told what that was.
        """
        self._unheard = None
        if self.failure is None:
            self.failure = error
            if not self._ended_as_agreed:
                self.guard.leave(error)
            if self.mesh is not None:
                hang_up_soon(self.mesh, error, self._transport)
        if not self._ended_as_agreed:
            self.guard.fail(error)

    def lose(self, error: PeerLostError, is_gone: bool) -> None:
        """Another rank failed, as a thread of the watch learnt: end this rank's waits, so that its script does.

        Args:
            error: what to raise.
            is_gone: whether that rank is gone; else it raised something, which all ranks may be about to raise alike.
        """
        grace = 0.0 if is_gone else GRACE_SECONDS
        background.run_later(grace, lambda: self._give_up(error))
        background.run_later(2 * grace, self._give_up_default_group)

    def hang_up(self) -> None:
        """Close this rank's connections at once: nobody needs them any more."""
        if self.mesh is not None:
            hang_up(self.mesh, self._transport)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A collective runs meanwhile: if another rank is gone, the session has failed.

        Raises:
            PeerLostError: with what went wrong there, if that is known.
        """
        try:
            yield
        except PeerLostError as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            if self._unheard is None and not is_noise(error):
                raise
            lost = peer_lost("a rank", error)
            self.fail(lost)
            raise lost from None

    def _give_up(self, error: PeerLostError) -> None:
        if self.failure is None:
            self.failure = self._unheard = error
        self.hang_up()

    def _give_up_default_group(self) -> None:
        if self._unheard is not None:
            leave_default_group()

    @property
    def _transport(self) -> Transport | None:
        return self.engine.runner.transport if self.engine is not None else None

    @property
    def _ended_as_agreed(self) -> bool:
        """Whether all ranks have agreed to end here, and finished what was in flight: no failure of this rank."""
        return self.engine is not None and self.engine.updates.agreed.interrupted and self.engine.idle
