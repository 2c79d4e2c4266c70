"""Compares what a pipeline trained with what one process trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.tools.doctor.cases import Case
from lightning_asyncpp.tools.doctor.findings import Status

_METRIC, _METRIC_TOLERANCE = "val_loss", 1e-3
"""Relative: a pipeline takes a mean over micro-batches, and on GPUs weights are equal to rounding."""


def judged(
    case: Case, outcome: Mapping[str, Any], expected: Mapping[str, Any], is_exact: bool
) -> tuple[Status, str, dict[str, Any], str]:
    """Status, text, figures and fix of one comparison."""
    tolerance = 0.0 if is_exact else case.tolerance
    difference, where = largest_difference(outcome["weights"], expected["weights"], expected["start"])
    figures: dict[str, Any] = {"difference": difference, "tolerance": tolerance}
    figures["seconds"] = round(outcome["seconds"], 2)
    metric, alone = outcome["metrics"].get(_METRIC), expected["metrics"].get(_METRIC)
    if alone is not None:
        figures |= {_METRIC: metric, f"{_METRIC} of one process": alone}
    if not difference <= tolerance:
        text = (
            f"trains something else: {where} differs by {difference:.2g} of its largest change (allowed: {tolerance:g})"
        )
        return "failed", text, figures, "do not train so; report it with this file"
    if alone is not None and (metric is None or not abs(metric - alone) <= _METRIC_TOLERANCE * abs(alone)):
        return "failed", f"{_METRIC} is {metric}, and in one process {alone}", figures, "report it with this file"
    saved, where = largest_difference(outcome["saved"], expected["saved"], _nothing(expected["saved"]))
    if not saved <= tolerance or bool(expected["saved"]) != case.saves:
        text = f"its checkpoint holds something else: {where or 'all'} differs by {saved:.2g} of its largest value"
        return "failed", text, figures, "do not resume from such checkpoints; report it with this file"
    text = "equal to the last bit" if not difference else f"equal to rounding: {difference:.1g} of the largest change"
    return "ok", f"{text} ({_route(outcome['route'])})", figures, ""


def largest_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Of all weights, as a share of the largest change in the tensor, and in which; infinite where one is missing."""
    if sorted(found) != sorted(expected):
        return float("inf"), str(sorted(set(found) ^ set(expected))[0])
    worst, where = 0.0, next(iter(expected), "")
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).abs().max().item()
        if not difference:
            continue
        change = (value.double() - start[name].double()).abs().max().item()
        share = difference / change if change else float("inf")
        if not share <= worst:  # also where it is NaN
            worst, where = share, name
    return worst, where


def _nothing(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def _route(described: str) -> str:
    """How tensors travelled, of what a strategy says of its pipeline."""
    return described.rpartition("; ")[2] or "no messages"
