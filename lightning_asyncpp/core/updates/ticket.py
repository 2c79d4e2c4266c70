"""Tickets: what was set for a mini-batch, kept for the update that comes one batch later."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Ticket:
    """What was set for a mini-batch.

    Attributes:
        groups: the hyper-parameters of each of the optimizer's groups.
        note: what the strategy wants to know again at the update; the pipeline does not look at it.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    note: Any = None


class TicketOffice:
    """Files copies of an optimizer's group hyper-parameters and sets them for the update that they belong to.

    Some optimizers keep state of their own in ``param_groups`` (a step count, a running maximum). A key that a step
    was once seen to change belongs to the optimizer from then on, and tickets leave it alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._owned_by_step: set[tuple[int, str]] = set()

    def file(self, note: Any = None) -> Ticket:
        """Copy every group's hyper-parameters as the schedulers have them now; the note is kept with them."""
        return Ticket([_hyper_parameters(group) for group in self.optimizer.param_groups], note)

    @contextmanager
    def redeemed(self, ticket: Ticket) -> Iterator[None]:
        """Run one optimizer step under the ticket's hyper-parameters, then put back those of the present.

        What the step changed itself is kept as the step left it.
        """
        groups = self.optimizer.param_groups
        present = [_hyper_parameters(group) for group in groups]
        for index, (group, old) in enumerate(zip(groups, ticket.groups)):
            for key, value in old.items():
                if (index, key) not in self._owned_by_step and key in group:
                    group[key] = _copied(value)
        before_step = [_hyper_parameters(group) for group in groups]
        yield
        for index, (group, before, now) in enumerate(zip(groups, before_step, present)):
            for key, value in now.items():
                if (index, key) in self._owned_by_step:
                    continue
                if _equal(group[key], before[key]):
                    group[key] = value
                else:
                    self._owned_by_step.add((index, key))


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)
