"""The norm of a gradient over all stages, and clipping by it or by value.

torch's own function, called on what a pipeline trains, would take the norm of one stage, or do nothing, without a word,
since gradients exist only while an update is applied: it is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad, clip_grad_value_

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.private_names import required

_CLIP = "_clip_grads_with_norm_"  # to which all of torch's functions that clip by a norm come


def check_norm_type(norm_type: float) -> None:
    """Refuse norms other than the 2-norm: the control message carries a sum of squares.

    Raises:
        ConfigurationError: it is another one.
    """
    if norm_type != 2.0:
        raise ConfigurationError(
            f"norm_type={norm_type}: over pipeline stages gradients are clipped by their 2-norm only; leave it out"
        )


def gradient_norm(sum_of_squares: float, weight: float) -> float:
    """Norm of the mean gradient from the squares of the summed one, rounded to fp32.

    Rounding hides the last bits of the fp64 sum, whose order depends on the number of stages.
    """
    norm = math.sqrt(sum_of_squares) / weight if weight else 0.0
    return float(torch.tensor(norm, dtype=torch.float32))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor of ``torch.nn.utils.clip_grad_norm_`` for a gradient of norm ``norm``."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_by_norm(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients of a stage, as part of one of norm ``norm`` over all stages, to a norm of ``max_norm``."""
    factor = clip_coefficient(norm, max_norm)
    if factor < 1.0:
        # Each on its own: torch._foreach_mul_ would round the factor to bf16 where the gradients are.
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def clip_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Limit every element of the gradients that there are: a stage may have none in an update, which torch refuses."""
    if with_gradient := [parameter for parameter in parameters if parameter.grad is not None]:
        clip_grad_value_(with_gradient, limit)


class ClippingGuard:
    """Refuses torch's own clipping by a norm from :meth:`begin` to :meth:`end`.

    Args:
        mend: what to call instead, in words.
    """

    def __init__(self, mend: str) -> None:
        self._mend = mend
        self._guarded: dict[int, weakref.ref[Tensor]] = {}  # an id alone may be another's by now
        self._before: Callable[..., Any] | None = None

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Guard the parameters of this stage.

        Raises:
            PrivateNameError: torch clips in another way by now.
        """
        self.end()
        self._guarded = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        self._before = required(clip_grad, _CLIP, "refuse clipping by the norm of one stage")
        setattr(clip_grad, _CLIP, self._clip)

    def end(self) -> None:
        """Let everybody clip again."""
        if self._before is not None and getattr(clip_grad, _CLIP) == self._clip:
            setattr(clip_grad, _CLIP, self._before)
        self._guarded = {}  # a call that has begun, or another's guard, may still come here

    def _clip(self, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        assert self._before is not None
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(self._guards(parameter) for parameter in given):
            raise ConfigurationError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of this stage's gradients alone, and they exist"
                f" only while an update is applied: {self._mend}, which takes the norm over all stages"
            )
        return self._before(given, *args, **kwargs)

    def _guards(self, parameter: Tensor) -> bool:
        known = self._guarded.get(id(parameter))
        return known is not None and known() is parameter
