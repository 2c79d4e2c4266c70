"""When torch's fused AdamW may be used: one pass over memory instead of a dozen, equal to rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

DEVICES = ("cpu", "cuda")
"""Where the fused step is known to equal the plain one."""


def can_be_fused(params: Iterable[Tensor]) -> bool:
    """Whether torch has a fused AdamW for such parameters; none at all count as well."""
    return all(p.is_floating_point() and p.device.type in DEVICES for p in params)


@contextmanager
def fused_where_layouts_agree(group: dict[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
    """Take ``group["fused"]`` away for a step in which it would go wrong.

    On CPUs torch's fused step walks through memory, whatever the strides: with a gradient that is laid out unlike its
    parameter it silently pairs the wrong elements (torch 2.15).
    """
    fused = group.get("fused")
    if fused and not all(_is_contiguous(p, state) for p in group["params"] if p.grad is not None):
        group["fused"] = False
    try:
        yield
    finally:
        group["fused"] = fused


def _is_contiguous(p: Tensor, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    moments = (t for key, t in state.get(p, {}).items() if key != "step")
    return all(t.is_contiguous() for t in (p, p.grad, *moments) if t is not None)
