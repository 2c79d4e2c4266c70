"""torch's own clipping, called on what a pipeline trains, would take the norm of one stage: it is refused.

Or it would do nothing, without a word: gradients exist only while an update is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.private_names import required

_CLIP = "_clip_grads_with_norm_"  # to which all of torch's functions that clip by a norm come


class ClippingGuard:
    """Refuses it from :meth:`begin` to :meth:`end`.

    Args:
        mend: what to call instead, in words.
    """

    def __init__(self, mend: str) -> None:
        self._mend = mend
        self._guarded: frozenset[int] = frozenset()
        self._before: Callable[..., Any] | None = None

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Guard the parameters of this stage.

        Raises:
            PrivateNameError: torch clips in another way by now.
        """
        self.end()
        self._guarded = frozenset(map(id, parameters))
        self._before = required(clip_grad, _CLIP, "refuse clipping by the norm of one stage")
        setattr(clip_grad, _CLIP, self._clip)

    def end(self) -> None:
        """Let everybody clip again."""
        if self._before is not None and getattr(clip_grad, _CLIP) == self._clip:
            setattr(clip_grad, _CLIP, self._before)
        self._guarded = frozenset()  # a call that has begun, or another's guard, may still come here

    def _clip(self, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        assert self._before is not None
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(id(parameter) in self._guarded for parameter in given):
            raise ConfigurationError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of this stage's gradients alone, and they exist"
                f" only while an update is applied: {self._mend}, which takes the norm over all stages"
            )
        return self._before(given, *args, **kwargs)
