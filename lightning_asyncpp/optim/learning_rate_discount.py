"""Smaller steps for older gradients, at the start of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.correction import DelayCorrection, Weights
from lightning_asyncpp.optim.correction_checks import check_arguments, check_base


class LearningRateDiscount(DelayCorrection):
    """Divide steps by the staleness of their gradients, less and less so over the first updates.

    Source: PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124), technique T1. With u_t the base optimizer's step and
    tau the staleness::

        p_t     = 1 - min(t / anneal_steps, 1)
        W_{t+1} = W_t - u_t / tau ** p_t

    PipeMare's tau is the delay in updates. For gradients one update old that is 1, and the rule changes nothing: give
    ``staleness`` to discount them all the same. (Its technique T2 corrects backwards that run on other weights than
    their forwards; there is nothing like that here: both run on the same version.)

    Memory: no buffer; the weights before the step as for ErrorFeedback.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``.
        anneal_steps: updates after which steps are whole, at least 1.
        staleness: tau, at least 1; None: the number of updates that the parameter's gradients are old.

    Raises:
        ValueError: all problems of the configuration at once.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    state_name = "learning_rate_discount"
    buffer_names = ()
    option_names = ("anneal_steps", "staleness")

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        anneal_steps: int = 100,
        staleness: float | None = None,
    ) -> None:
        check_base(base)
        problems = []
        if anneal_steps < 1:
            problems.append(f"anneal_steps must be at least 1, got {anneal_steps!r}")
        if staleness is not None and not staleness >= 1:
            problems.append(f"staleness must be at least 1, or None for the delay, got {staleness!r}")
        check_arguments("LearningRateDiscount", problems)
        super().__init__(params, base)
        self.anneal_steps = anneal_steps
        self.staleness = staleness

    def _after_step(self, moving: list[Tensor], before: Weights) -> None:
        power = 1.0 - min(self._memory.steps / self.anneal_steps, 1.0)
        if power == 0:
            return
        for p in moving:
            staleness = self.delay_of(p) if self.staleness is None else self.staleness
            p.lerp_(before[p], 1.0 - float(staleness) ** -power)
