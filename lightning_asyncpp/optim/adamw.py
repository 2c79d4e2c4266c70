"""AdamW's step for some parameters of another optimizer, by torch's own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

FUSED_DEVICES = ("cpu", "cuda")
"""Where the fused step of AdamW is known to equal the plain one."""


def step_adamw(params: list[Tensor], state: dict[Tensor, dict[str, Any]], lr: float, group: dict[str, Any]) -> None:
    """Step parameters that have gradients as ``torch.optim.AdamW`` does, fused where possible.

    Args:
        params: to update in place.
        state: of each parameter, with the entries of ``torch.optim.AdamW``; made at the first gradient.
        lr: AdamW's own.
        group: ``adamw_betas``, ``adamw_eps``, and ``adamw_weight_decay``, which is ``weight_decay`` where it is None.
    """
    fused: list[Tensor] = []
    plain: list[Tensor] = []
    for p in params:
        entries = state[p]
        if "exp_avg" not in entries:
            entries["step"] = torch.zeros((), dtype=torch.float32)
            entries["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            entries["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        (fused if _can_be_fused(p, entries) else plain).append(p)
    for p in fused:  # the kernel reads the count on the parameter's device
        state[p]["step"] = state[p]["step"].to(p.device)
    decay = group["adamw_weight_decay"]
    for some, by_kernel in ((fused, True), (plain, None)):
        adamw(
            some,
            [p.grad for p in some if p.grad is not None],
            [state[p]["exp_avg"] for p in some],
            [state[p]["exp_avg_sq"] for p in some],
            [],
            [state[p]["step"] for p in some],
            fused=by_kernel,
            amsgrad=False,
            beta1=group["adamw_betas"][0],
            beta2=group["adamw_betas"][1],
            lr=lr,
            weight_decay=group["weight_decay"] if decay is None else decay,
            eps=group["adamw_eps"],
            maximize=False,
        )


def _can_be_fused(p: Tensor, entries: dict[str, Any]) -> bool:
    """Whether the kernel, which takes one pass over memory instead of a dozen, equals the plain step to rounding.

    On CPUs it walks through memory, whatever the strides: with a gradient that is laid out unlike its parameter it
    silently pairs the wrong elements (torch 2.15).
    """
    tensors = (p, p.grad, entries["exp_avg"], entries["exp_avg_sq"])
    return (
        p.is_floating_point()
        and p.device.type in FUSED_DEVICES
        and all(t.is_contiguous() for t in tensors if t is not None)
    )
