"""The optimizer of a stage while updates come out of its engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.stage_optimizer import StageOptimizer
from lightning_asyncpp.core.updates.mini_batch import Update
from lightning_asyncpp.core.weights import lent, writing

OptimizerStep = Callable[[Update], None]


class AttachedOptimizer:
    """Steps an optimizer with every update of an engine, until :meth:`release`.

    Args:
        stage_optimizer: of the engine's stage; its optimizer is told the delay if it wants to know.
        engine: whose updates are applied.
        step: clips the gradient of an update, and steps the optimizer.
        check: raises what ended the run meanwhile, if anything did; called before every step.

    Attributes:
        update: that is being applied.
    """

    def __init__(
        self, stage_optimizer: StageOptimizer, engine: Engine, step: OptimizerStep, check: Callable[[], None]
    ) -> None:
        self.stage_optimizer, self._engine, self._step, self._check = stage_optimizer, engine, step, check
        self.optimizer = stage_optimizer.optimizer
        self.update: Update | None = None
        self.set_delay()
        engine.weights.masters_hold_weights = not callable(getattr(self.optimizer, "compute_weights", None))
        optimized = set(stage_optimizer.parameters)
        engine.updates.train_only([name for name, p in engine.stage.parameters.items() if p in optimized])
        engine.updates.apply = self._apply

    def release(self) -> None:
        """Let the engine go: a circle would keep its weights until a collection."""
        self._engine.updates.detach()
        self.stage_optimizer.release()

    def set_delay(self) -> None:
        """Tell the optimizer how old the gradients of the next mini-batch are, if it wants to know."""
        engine, rule = self._engine, self._engine.schedule.stage_rule
        self._set_delay(0 if rule.in_start(engine.mini_batch) else rule.staleness(engine.settings.micro_batches))

    def _set_delay(self, staleness: float) -> None:
        if callable(set_delay := getattr(self.optimizer, "set_delay", None)):
            set_delay(staleness)

    def _apply(self, update: Update) -> None:
        self._check()
        self._set_delay(update.staleness)
        self.update = update
        try:
            with (
                lent(self.optimizer, update.weights_before),
                writing(self.optimizer, self._engine.weights.compute_weights()),
            ):
                self.stage_optimizer.step(update.hyper_parameters, partial(self._step, update))
        finally:
            self.update = None
