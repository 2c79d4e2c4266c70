"""Random numbers of validations in a training, apart from those of the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_asyncpp.core.randomness import random_states, set_random_states


class ValidationRandomness:
    """Lets validations draw from torch, numpy and Python without a change in what the training draws.

    Every loader that is iterated, every sample that is augmented and every hook may draw: a training that shuffles or
    augments its data from the process's generators would depend on when it is validated, and stages, of which not all
    run validation steps to their end, would draw different numbers. The first validation goes on from the training's
    generators, each later one from where the one before ended.
    """

    def __init__(self) -> None:
        self._own: Mapping[str, Any] | None = None
        self._before: Mapping[str, Any] | None = None  # the last validation
        self._training: Mapping[str, Any] | None = None  # while a validation runs

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Draw from the validations' generators meanwhile."""
        self._training = random_states()
        self._before = self._own
        if self._own is not None:
            set_random_states(self._own)
        try:
            yield
        finally:
            self._own = random_states()
            set_random_states(self._training)
            self._training = None

    def forget_last(self) -> None:
        """Let the next validation draw what the last one drew, which did not come to its end."""
        self._own = self._before

    def of_training(self) -> Mapping[str, Any]:
        """The states of the training's generators, also while a validation runs."""
        return random_states() if self._training is None else self._training

    def of_validations(self) -> Mapping[str, Any] | None:
        """The states of the validations' generators; None before the first one."""
        return self._own if self._training is None else random_states()

    def go_on(self, states: Mapping[str, Any] | None) -> None:
        """Let the next validation draw from what :meth:`of_validations` returned."""
        self._own = states
