"""Layers that torch.compile turns into CUDA graphs: not where several forwards wait for their backwards.

A graph writes its activations into the same memory every time. A stage in a pipeline runs the next micro-batches
forward before the backward of the first one, which would then read theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_CUDA_GRAPHS = "triton.cudagraphs"
_MOST_NAMES = 5


def cuda_graph_problems(model: nn.Module, device: torch.device) -> list[str]:
    """Which layers of a stage were compiled with CUDA graphs, with the mend; none on other devices.

    Found is what was compiled by :meth:`torch.nn.Module.compile`, or is an attribute of a layer, its ``forward`` too.

    Args:
        model: the layers of a stage that runs several forwards before a backward.
        device: where it runs.
    """
    if device.type != "cuda":
        return []
    found = [name for name, module in model.named_modules() if any(map(_has_cuda_graphs, _callables(module)))]
    if not found:
        return []
    more = ", ..." if len(found) > _MOST_NAMES else ""
    return [
        f"{', '.join(found[:_MOST_NAMES])}{more}: compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune',"
        " or the option triton.cudagraphs), which write their activations into the same memory at every forward, while"
        " a stage runs several forwards before the first one's backward: use mode='max-autotune-no-cudagraphs', or"
        " options={'triton.cudagraphs': False}"
    ]


def _callables(module: nn.Module) -> list[Any]:
    return [module, *vars(module).values()]


def _has_cuda_graphs(compiled: Any) -> bool:
    """Whether it is what torch.compile returned, which tells its options, and has CUDA graphs among them."""
    get_config = getattr(compiled, "get_compiler_config", None)
    config = get_config() if callable(get_config) else None
    return isinstance(config, Mapping) and bool(config.get(_CUDA_GRAPHS))
