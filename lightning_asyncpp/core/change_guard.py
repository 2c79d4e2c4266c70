"""Refuses changes of weights where what they come to would depend on how far a stage has got."""

from __future__ import annotations

from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.ranks.agreement import agree_on_error
from lightning_asyncpp.core.untouched import Untouched
from lightning_asyncpp.errors import ConfigurationError

_LOOKS_TOGETHER = 2


class ChangeGuard:
    """Watches the weights of a stage between the calls of an engine; every method is for one of them.

    * From a batch that may run at the newest weights to the next one that shares its update, and to the update itself:
      backwards may be in flight, whose gradients would be taken at changed weights, on some stages only.
    * While an update is outstanding: it would be applied before the change or after it.

    The first times all ranks raise together: whoever changes weights mostly does so after every batch. It costs each of
    these mini-batches a wait for the whole pipeline, so they are few.

    Args:
        engine: of this stage.
        instead: where weights may be changed, in words.
    """

    def __init__(self, engine: Engine, instead: str) -> None:
        self._engine = engine
        self._under_way = _Watch(engine, "gradients were under way at them, so which of these see the change", instead)
        self._outstanding = _Watch(engine, "an update was outstanding, so how the change and the update mix", instead)

    def before_batch(self) -> None:
        """Raise if weights have changed since a batch that shares the update of the next one."""
        if self._engine.at_newest and self._engine.accumulating:
            self._under_way.check()

    def after_batch(self) -> None:
        """A batch ran."""
        if self._engine.at_newest:
            self._under_way.note()

    def before_close(self) -> None:
        """Raise if weights have changed since the last batch."""
        if self._engine.at_newest:
            self._under_way.check()
            self._under_way.forget()

    def before_updates(self) -> None:
        """Raise if weights have changed while an update was outstanding."""
        if not self._engine.schedule.pipeline_rule.flushes(self._engine.mini_batch - 1):
            self._outstanding.check()

    def after_updates(self) -> None:
        """The updates that were due have been applied."""
        if self._engine.updates.applied < self._engine.mini_batch:
            self._outstanding.note()

    def before_update_within(self) -> None:
        """Raise if weights have changed; on this rank alone, since other stages apply the update at another time."""
        self._outstanding.check(together=False)

    def after_update_within(self) -> None:
        """An update was applied within a batch: none is outstanding until that is over."""
        self._outstanding.forget()

    def before_drain(self) -> None:
        """Raise if weights have changed; on this rank alone, since a drain may come at any moment."""
        self._under_way.check(together=False)
        self._outstanding.check(together=False)

    def after_drain(self) -> None:
        """Nothing is under way: anybody may change weights."""
        self._under_way.forget()
        self._outstanding.forget()


class _Watch:
    """One of the two.

    Args:
        engine: of this stage.
        meanwhile: when weights may not be changed and why, in words.
        instead: where they may.
    """

    def __init__(self, engine: Engine, meanwhile: str, instead: str) -> None:
        self._mesh, self._meanwhile, self._instead = engine.mesh, meanwhile, instead
        self._untouched = Untouched(engine.weights.parameters)
        self.note, self.forget = self._untouched.note, self._untouched.forget
        self._looks = 0

    def check(self, together: bool = True) -> None:
        error = self._error()
        self._looks += together
        if together and self._looks <= _LOOKS_TOGETHER:
            agree_on_error(self._mesh, error)
        elif error:
            raise error

    def _error(self) -> ConfigurationError | None:
        if not (changed := self._untouched.changed()):
            return None
        return ConfigurationError(
            f"{', '.join(changed[:5])}: changed outside the optimizer's step while {self._meanwhile} would depend on"
            f" the schedule; change weights {self._instead}"
        )
