"""The same random numbers for a whole batch and for its microbatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SameDraws(TorchDispatchMode):
    """Meanwhile torch draws one number for all elements of a tensor, always the same one, and dropout drops nothing.

    A permutation is drawn as ever.

    Attributes:
        eps: of the coarsest floating-point dtype that anything was computed in.
    """

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = self._draw(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result

    def _draw(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or name == "randperm":
            return func(*args, **kwargs)
        if name == "native_dropout":
            return args[0] / (1.0 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = func(*args, **kwargs)
        if not isinstance(drawn, Tensor) or not drawn.numel():
            return drawn
        return drawn.fill_(1 if name.startswith("bernoulli") else drawn.flatten()[0])
