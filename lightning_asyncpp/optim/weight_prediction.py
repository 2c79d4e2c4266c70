"""Weight prediction: take gradients where the weights are expected to be when the gradients arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.correction import DelayCorrection, Entries, Weights
from lightning_asyncpp.optim.options import check_options


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
        ValueError: an option cannot be used.
    """

    keys = ("predicted_step", "predicted_horizon")

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        horizon: float | None = None,
        ahead: float = 0.0,
    ) -> None:
        check_options(self, {"horizon": horizon, "ahead": ahead})
        super().__init__(params, base)
        self.horizon = horizon
        self.ahead = ahead

    def _acts_on(self, p: Tensor) -> bool:
        return self.ahead > 0 or self.delay_of(p) > 0

    def _correct(self, params: list[Tensor], before: Weights, remembered: Entries) -> None:
        for p in params:
            known = remembered.get(p)
            if p not in before and known is None:
                continue
            step = before[p] - p if p in before else torch.zeros_like(p)
            delay = self.delay_of(p)
            horizon = self.ahead + (delay if delay == 0 or self.horizon is None else self.horizon)
            if known is not None:
                p.add_(known["predicted_step"], alpha=known["predicted_horizon"])
            p.sub_(step, alpha=horizon)
            self.state[p].update(predicted_step=step, predicted_horizon=horizon)
