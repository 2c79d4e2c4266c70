"""The same random numbers for a whole batch and for its microbatches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_asyncpp.core.randomness import seeded


class SameDraws(TorchDispatchMode):
    """Meanwhile torch draws one number for all elements of a tensor, always the same one, and dropout drops nothing."""

    eps = 0.0  # of the coarsest dtype that anything was computed in

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "native_dropout":
            return args[0] / (1.0 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        draws = torch.Tag.nondeterministic_seeded in func.tags and name != "randperm"
        device = next((x.device for x in args if isinstance(x, Tensor)), torch.device(kwargs.get("device") or "cpu"))
        with seeded(0, device) if draws else nullcontext():
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and draws and result.numel():
            result.fill_(1 if name.startswith("bernoulli") else result.flatten()[0])
        if isinstance(result, Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result
