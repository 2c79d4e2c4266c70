"""Base class of corrections for delayed gradients, which wrap an optimizer; and weight prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.errors import ConfigurationError

Weights = Mapping[Tensor, Tensor]
Entries = dict[Tensor, dict[str, Any]]


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value))


class DelayCorrection(Optimizer):
    """Optimizer that wraps another one and corrects its steps for delayed gradients.

    ``param_groups``, ``state`` and ``defaults`` are the base optimizer's own, so schedulers, monitors and code that
    sets ``group["lr"]`` or removes parameters from a group act on the base. The correction's state of a parameter is in
    ``state``, too, under the names in ``keys``; during the base's step it is hidden.

    A strategy sets the delay of the gradients (:meth:`set_delay`). If the delay is 0, the base steps as it would alone,
    unless :meth:`_acts_on` is overridden.

    Args:
        params: parameters as the base optimizer takes them: tensors, (name, tensor) pairs or groups.
        base: function that makes the optimizer from ``params``: a class,
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or in a YAML file ``class_path`` and ``init_args``.

    Attributes:
        base: the wrapped optimizer.
        delay: delay of all gradients in updates, or a mapping of parameters to delays.
    """

    keys: ClassVar[tuple[str, ...]]
    param_groups, state, defaults = _of_base("param_groups"), _of_base("state"), _of_base("defaults")

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer]) -> None:
        if not callable(base):
            raise ConfigurationError(
                f"base={type(base).__name__}(...): must be a function that makes the optimizer from parameters, such as"
                " functools.partial(torch.optim.SGD, lr=0.1)"
            )
        self.base = base(params)
        self.delay: float | Mapping[Tensor, float] = 1
        self._provided: Weights | None = None
        self._compute: Weights | None = None
        self.__setstate__({})  # sets an optimizer's attributes other than groups and state

    def __getattr__(self, name: str) -> Any:
        """Return the base's methods for parameter names and for the modes of schedule-free optimizers."""
        if name in ("train", "eval", "name_parameters"):
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- for subclasses -------------------------------------------------------------------------------------------

    def _correct(self, params: list[Tensor], before: Weights, remembered: Entries) -> None:
        """Correct weights after the base's step, and put the correction's state into ``state``.

        Args:
            params: all parameters that the correction acts on.
            before: weights before the step, of those parameters that have a gradient.
            remembered: the correction's state of the last update.
        """
        raise NotImplementedError

    def _acts_on(self, p: Tensor) -> bool:
        """Return whether the steps of ``p`` are corrected."""
        return self.delay_of(p) > 0

    def _weights_before(self, moving: list[Tensor], remembered: Entries) -> Weights:
        """Return the weights of ``moving`` before the step: the tensors given to :meth:`weights_before`, or copies."""
        provided = self._provided or {}
        return {p: provided[p] if p in provided and self.delay_of(p) else p.detach().clone() for p in moving}

    def _write(self, weights: Weights) -> None:
        """Set the compute weights (those of forwards and backwards) from the parameters, by default by rounding."""
        for p, tensor in weights.items():
            tensor.copy_(p)

    # -- for strategies --------------------------------------------------------------------------------------------

    def set_delay(self, delay: float | Mapping[Tensor, float]) -> None:
        """Set the delay of the gradients in updates: one for all (the default is 1), or one per parameter.

        A fraction below 1 is the share of the microbatches that ran on the weights before the last update.
        """
        self.delay = delay

    def delay_of(self, p: Tensor) -> float:
        """Return the delay of the gradients of ``p`` in updates."""
        return self.delay.get(p, 0) if isinstance(self.delay, Mapping) else self.delay

    @contextmanager
    def weights_before(self, weights: Weights) -> Iterator[None]:
        """Provide the weights before the step: ``with optimizer.weights_before({p: copy, ...}): optimizer.step()``.

        Args:
            weights: for each parameter a tensor of its shape, dtype and value that shares no memory with it; only read.
        """
        self._provided = weights
        try:
            yield
        finally:
            self._provided = None

    @contextmanager
    def compute_weights(self, weights: Weights) -> Iterator[None]:
        """Write the compute weights after the step: ``with optimizer.compute_weights({p: t, ...}): optimizer.step()``.

        Args:
            weights: for every parameter the tensor of its shape that forwards and backwards use, in their dtype.
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
        loss = None if closure is None else torch.enable_grad()(closure)()
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
        """Return the base optimizer's state, which includes the correction's state of each parameter."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, or a state of the base alone, with which the correction begins anew."""
        self.base.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_optimizer_") and key != "step"}

    def _take_remembered(self, params: list[Tensor]) -> Entries:
        """Remove the correction's state from ``state``, since a base may test whether ``state`` is empty; return it."""
        remembered: Entries = {}
        for p in params:
            state = self.state.get(p, {})
            if entries := {key: state.pop(key) for key in self.keys if key in state}:
                remembered[p] = entries
        return remembered


class WeightPrediction(DelayCorrection):
    """Optimizer that extrapolates the weights along the last step, over as many updates as gradients are delayed.

    Sources: SpecTrain (Chen et al., arXiv 1809.02839) and XPipe (Guan et al., arXiv 1911.04610), which predict with the
    optimizer's momentum. For SGD with momentum and AdamW without weight decay, that equals the last step. This class
    uses any optimizer's last step. With weights W_t before update t, base step u_t, h the delay, a = ``ahead``::

        Y_{t+1} = Y_t - u_t                               the trajectory of the base, Y_0 = W_0
        W_{t+1} = Y_{t+1} - (h + a) * u_t                 gradients are taken here

    h may change during a run, when the first updates without delay are over; Y is not affected. Where h + a becomes 0,
    the last prediction is taken back, and the base goes on alone. With h + a = s this is
    :class:`~lightning_asyncpp.optim.ErrorFeedback` of strength s, except that WeightPrediction already predicts at the
    first update. The base steps on W, so its weight decay acts on W.

    Memory: one buffer per parameter, u_t, in the parameter's dtype, and the weights before the step as for
    ErrorFeedback.

    Args:
        params: parameters as the base optimizer takes them: tensors, (name, tensor) pairs or groups.
        base: function that makes the optimizer from ``params``.
        ahead: number of steps to look ahead besides the delay, at least 0, also without delay. Without delay
            ``ahead=1`` steps by 2 u_t - u_{t-1}, as optimistic methods do (Daskalakis et al., arXiv 1711.00141).
    """

    keys = ("predicted_step", "predicted_horizon")

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer], ahead: float = 0.0) -> None:
        super().__init__(params, base)
        self.ahead = ahead

    def _acts_on(self, p: Tensor) -> bool:
        return self.ahead > 0 or self.delay_of(p) > 0 or "predicted_step" in self.state.get(p, {})

    def _correct(self, params: list[Tensor], before: Weights, remembered: Entries) -> None:
        for p in params:
            known = remembered.get(p)
            if p not in before and known is None:
                continue
            step = before[p] - p if p in before else torch.zeros_like(p)
            horizon = self.ahead + self.delay_of(p)
            if known is not None:
                p.add_(known["predicted_step"], alpha=known["predicted_horizon"])
            if horizon:
                p.sub_(step, alpha=horizon)
                self.state[p].update(predicted_step=step, predicted_horizon=horizon)
