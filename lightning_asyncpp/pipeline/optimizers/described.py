"""What an optimizer and its schedulers were told, in plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_asyncpp.pipeline.optimizers.configured import name_of

# Names and tensors, and how a step is computed, which goes by the device.
_NO_OPTIONS = frozenset(("params", "param_names", "name", "initial_lr", "fused", "foreach", "capturable"))
_OF_GROUPS = frozenset(("base_lrs", "lr_lambdas", "last_epoch", "max_lrs"))  # of a scheduler: a stage has its own


def rule(optimizer: Optimizer) -> dict[str, Any]:
    """What it is: its class, and what corrections around it were told; no checkpoint changes that."""
    found: dict[str, Any] = {"class": name_of(optimizer)}
    inner: Any = optimizer
    while isinstance(inner, Optimizer):
        kind = type(inner).__name__
        told = (name for name in getattr(inner, "option_names", ()) if hasattr(inner, name))
        found |= {f"{kind}: {name}": getattr(inner, name) for name in told}
        inner = getattr(inner, "base", None)
    return found


def options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None = None, stage: int = 0) -> dict[str, Any]:
    """Name of an option of its groups -> value; a checkpoint brings its own.

    Args:
        optimizer: of a stage.
        groups: those of the whole model, if they are known; else the optimizer's own count.
        stage: where it is; options of several groups that only a stage knows are named after it.
    """
    known = groups is not None
    shown = optimizer.param_groups if groups is None else groups
    found: dict[str, Any] = {}
    for index, group in enumerate(shown):
        name = group.get("name") or (f"group {index}" if known else f"group {index} of stage {stage}")
        prefix = f"{name}: " if len(shown) > 1 else ""
        told = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group  # a schedule has changed it
        found |= {f"{prefix}{key}": value for key, value in told.items() if key not in _NO_OPTIONS}
    return found


def schedule(schedulers: Sequence[Any]) -> dict[str, Any]:
    """What schedulers of learning rates were told, but functions, which nobody can compare.

    Args:
        schedulers: with a ``state_dict()``, before they make their first step.
    """
    found = {}
    for index, scheduler in enumerate(schedulers):
        prefix = f"{index}: " if len(schedulers) > 1 else ""
        found[f"{prefix}class"] = type(scheduler).__name__
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
        groups = len(getattr(getattr(scheduler, "optimizer", None), "param_groups", ()))
        is_torchs = type(scheduler).__module__.startswith("torch.")
        told = _told(state).items() if is_torchs else _of_no_group(_told(state), groups).items()
        found |= {f"{prefix}{key}": value for key, value in told}
    return found


def _of_no_group(told: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """What of somebody else's scheduler is not a value for every group, of which a stage has its own."""
    return {
        key: value for key, value in told.items() if not (isinstance(value, (list, tuple)) and len(value) == groups)
    }


def _told(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Its plain entries, and those of schedulers in it, which are a list."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            for index, inner in enumerate(value):
                found |= _told(inner, f"{prefix}{index}: ")
        elif key not in _OF_GROUPS and (not key.startswith("_") or key == "_milestones"):
            found[f"{prefix}{key.lstrip('_')}"] = value
    return found
