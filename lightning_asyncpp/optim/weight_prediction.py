"""Weight prediction: take gradients where the weights are expected to be when the gradients arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.checks import check_base, raise_problems
from lightning_asyncpp.optim.correction import DelayCorrection, Weights


class WeightPrediction(DelayCorrection):
    """Extrapolate the weights by the last steps, as far as the gradients are old.

    Sources: SpecTrain (Chen et al., arXiv 1809.02839) and XPipe (Guan et al., arXiv 1911.04610), which predict with
    the optimizer's momentum: for SGD with momentum and for AdamW without weight decay that is the last step, here for
    any optimizer. With u_t the base optimizer's step, h the horizon and a ``ahead``::

        Y_{t+1} = Y_t - u_t                               the trajectory of the base, Y_0 = W_0
        W_{t+1} = Y_{t+1} - (h + a) * u_t                 gradients are taken here; h = 0 where they are fresh

    h may change in mid-run, at the end of a synchronous start: Y goes on.

    In terms of W alone: W_{t+1} = W_t - u_t - (h + a) * (u_t - u_{t-1}), with u_{-1} = 0. With h + a = s this is
    :class:`~lightning_asyncpp.optim.ErrorFeedback` of strength s but for the first update, where it predicts at once.
    So a strength of 2 under a delay of one is ``ahead=1``: it makes up for the delay, and looks one step ahead. The
    base steps on W: its weight decay acts on W.

    Memory: one buffer per parameter, u_t, in the parameter's dtype, and the weights before the step as for
    ErrorFeedback.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``.
        horizon: steps ahead, at least 0; None: as many updates as the parameter's gradients are old.
        ahead: steps to look ahead of the present, at least 0; where gradients are fresh, too. There ``ahead=1`` steps
            by 2 u_t - u_{t-1}, as optimistic methods do (Daskalakis et al., arXiv 1711.00141).

    Raises:
        ValueError: all problems of the configuration at once.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    state_name = "weight_prediction"
    buffer_names = ("predicted_step",)
    option_names = ("horizon", "ahead")
    removed = {"smoothing": 0.0, "source": "last_step"}

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        horizon: float | None = None,
        ahead: float = 0.0,
    ) -> None:
        check_base(base)
        problems = []
        if horizon is not None and not horizon >= 0:
            problems.append(f"horizon must be at least 0, or None for the delay, got {horizon!r}")
        if not ahead >= 0:
            problems.append(f"ahead must be at least 0, got {ahead!r}")
        raise_problems("WeightPrediction", problems)
        super().__init__(params, base)
        self.horizon = horizon
        self.ahead = ahead

    def _after_step(self, moving: list[Tensor], before: Weights) -> None:
        known = self._memory.buffers["predicted_step"]
        for p in self._parameters():
            if p not in before and p not in known:
                continue
            step = before[p] - p if p in before else p.new_zeros(p.shape)
            predicted = self._buffer("predicted_step", p)
            horizon = self._horizon(p)
            p.add_(predicted, alpha=self._memory.horizons.get(p, horizon))
            predicted.copy_(step)
            p.sub_(predicted, alpha=horizon)
            self._memory.horizons[p] = horizon

    @property
    def _acts_on_fresh(self) -> bool:
        return self.ahead > 0

    def _horizon(self, p: Tensor) -> float:
        delay = self.delay_of(p)
        return self.ahead + (delay if delay == 0 or self.horizon is None else self.horizon)
