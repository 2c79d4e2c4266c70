"""The optimizer of a stage while updates come out of a pipeline: each is a step with what was set for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.optimizers.steps import DURING_AN_UPDATE
from lightning_asyncpp.core.updates.mini_batch import Update
from lightning_asyncpp.core.updates.ticket import Ticket, TicketOffice
from lightning_asyncpp.core.weights import leave_out, lent, writing

OptimizerStep = Callable[[Update], None]


class AttachedOptimizer:
    """Steps an optimizer with every update of an engine, and refuses steps past it until :meth:`release`.

    Args:
        optimizer: of the engine's stage; it is told the delay if it wants to know.
        engine: whose updates are applied.
        step: clips the gradient of an update, and steps the optimizer.
        check: raises what ended the run meanwhile, if anything did; called before every step.

    Attributes:
        update: that is being applied.
    """

    def __init__(self, optimizer: Optimizer, engine: Engine, step: OptimizerStep, check: Callable[[], None]) -> None:
        self.optimizer, self._engine, self._step, self._check = optimizer, engine, step, check
        self.update: Update | None = None
        self._told: float | None = None
        self._office = TicketOffice(optimizer)
        self.tell_delay()
        engine.weights.masters_hold_weights = not callable(getattr(optimizer, "compute_weights", None))
        engine.updates.apply, engine.updates.leave_out = self._apply, lambda: leave_out(optimizer)

    def release(self) -> None:
        """Let anybody step the optimizer, and the engine go: a circle would keep its weights until a collection."""
        self._engine.updates.detach()

    def check_drain(self) -> None:
        """Refuse a drain by what is called while an update is applied: it would find a part of that.

        Raises:
            RuntimeError: one is applied.
        """
        if self.update is not None:
            raise RuntimeError(DURING_AN_UPDATE)

    def tell_delay(self) -> None:
        """Tell the optimizer how old the gradients of a mini-batch are, if it wants to know, before any update."""
        engine, rule = self._engine, self._engine.schedule.stage_rule
        self._tell(0 if rule.in_start(engine.mini_batch) else rule.staleness(engine.settings.micro_batches))

    def file_ticket(self, note: Any) -> Ticket:
        """What is set for the mini-batch that ends, kept for its update.

        Args:
            note: what the strategy wants to find in it.
        """
        return self._office.file(note)

    def _tell(self, staleness: float) -> None:
        if callable(set_delay := getattr(self.optimizer, "set_delay", None)):
            set_delay(staleness)
        self._told = staleness

    def _apply(self, update: Update) -> None:
        self._check()
        self._tell(update.staleness)
        weights = self._engine.weights
        self.update = update
        try:
            lending = lent(self.optimizer, update.weights_before)
            with (
                _only(self.optimizer, weights.parameters.values()),
                self._office.redeemed(update.ticket),
                lending,
                writing(self.optimizer, weights.compute_weights()),
            ):
                self._step(update)
        finally:
            self.update = None


@contextmanager
def _only(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    own = set(map(id, parameters))
    before = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"][:] = [p for p in group["params"] if id(p) in own]
    try:
        yield
    finally:
        for group, all_ in zip(optimizer.param_groups, before):
            group["params"][:] = all_
