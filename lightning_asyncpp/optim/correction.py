"""What corrections for delayed gradients share, an optimizer around another one; and prediction of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

Weights = Mapping[Tensor, Tensor]
Entries = dict[Tensor, dict[str, Any]]


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value))


class DelayCorrection(Optimizer):
    """An optimizer around another one, which changes its steps because its gradients are old.

    ``param_groups``, ``state`` and ``defaults`` are the base optimizer's own, so schedulers, monitors and whoever sets
    ``group["lr"]`` or takes parameters out of a group act on it. What a correction remembers of a parameter is in
    ``state`` too, under the names in ``keys``; during its step the base does not see it.

    A strategy sets how old the gradients are (:meth:`set_delay`); where they are fresh the base steps as it would
    alone.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``: a class, ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or in a
            YAML file ``class_path`` and ``init_args``.

    Attributes:
        base: the wrapped optimizer.
        delay: of all gradients in updates, or parameter -> delay.
    """

    keys: ClassVar[tuple[str, ...]]
    param_groups, state, defaults = _of_base("param_groups"), _of_base("state"), _of_base("defaults")

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer]) -> None:
        self.base = base(params)
        self.delay: float | Mapping[Tensor, float] = 1
        self._lent: Weights | None = None
        self._compute: Weights | None = None
        self.__setstate__({})  # what an optimizer needs beside groups and state

    def __getattr__(self, name: str) -> Any:
        """Pass on names of parameters, and the modes of schedule-free optimizers, where the base takes them."""
        if name in ("train", "eval", "name_parameters"):
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- what a subclass does -------------------------------------------------------------------------------------

    def _correct(self, params: list[Tensor], before: Weights, remembered: Entries) -> None:
        """Change weights after the base stepped, and put what is to be remembered into ``state``.

        Args:
            params: all of the optimizer.
            before: the weights before the step of those that have a gradient and are delayed.
            remembered: what was put into ``state`` at the last update.
        """
        raise NotImplementedError

    def _acts_on(self, p: Tensor) -> bool:
        """Tell whether the steps of ``p`` are changed."""
        return self.delay_of(p) > 0

    def _weights_before(self, moving: list[Tensor], remembered: Entries) -> Weights:
        """Return the weights of ``moving`` in memory that the step leaves alone: lent, or a copy."""
        lent = self._lent or {}
        return {p: lent[p] if p in lent and self.delay_of(p) else p.detach().clone() for p in moving}

    def _write(self, weights: Weights) -> None:
        """Write the weights that gradients are taken at from the masters: by default these, rounded."""
        for p, tensor in weights.items():
            tensor.copy_(p)

    # -- what a strategy calls -------------------------------------------------------------------------------------

    def set_delay(self, delay: float | Mapping[Tensor, float]) -> None:
        """Set how many updates old the gradients are: all alike (1 is the default), or each parameter's.

        A fraction below 1 is the share of the microbatches that was taken at the weights before the last update.
        """
        self.delay = delay

    def delay_of(self, p: Tensor) -> float:
        """Return how many updates old the gradients of ``p`` are."""
        return self.delay.get(p, 0) if isinstance(self.delay, Mapping) else self.delay

    @contextmanager
    def weights_before(self, weights: Weights) -> Iterator[None]:
        """Lend the weights as they are before the step: ``with ef.weights_before({p: copy, ...}): ef.step()``.

        Args:
            weights: parameter -> a tensor of its shape, dtype and value, in memory of its own; only read.
        """
        self._lent = weights
        try:
            yield
        finally:
            self._lent = None

    @contextmanager
    def compute_weights(self, weights: Weights) -> Iterator[None]:
        """Step masters: ``with ef.compute_weights({p: tensor, ...}): ef.step()`` writes what gradients are taken at.

        Args:
            weights: for every parameter a tensor of its shape, in the dtype of forwards and backwards.
        """
        self._compute = weights
        try:
            yield
            with torch.no_grad():
                self._write(weights)
        finally:
            self._compute = None

    # -- an optimizer ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the base optimizer and correct; ``closure`` is evaluated once, before the weights move."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        acting = [p for p in params if self._acts_on(p)]
        with torch.no_grad():
            remembered = self._take_remembered(params)
            before = self._weights_before([p for p in acting if p.grad is not None], remembered)
        self.base.step()
        with torch.no_grad():
            self._correct(acting, before, remembered)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, in the base optimizer's way."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer."""
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's, whose state has what is remembered of each parameter."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a state of the base alone: then the correction begins anew."""
        self.base.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_optimizer_") and key != "step"}

    def _take_remembered(self, params: list[Tensor]) -> Entries:
        """Take what is remembered out of ``state``: a base may go by its emptiness."""
        remembered: Entries = {}
        for p in params:
            state = self.state.get(p, {})
            if entries := {key: state.pop(key) for key in self.keys if key in state}:
                remembered[p] = entries
        return remembered


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
    """

    keys = ("predicted_step", "predicted_horizon")

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        horizon: float | None = None,
        ahead: float = 0.0,
    ) -> None:
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
