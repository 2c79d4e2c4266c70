"""What an optimizer and its schedulers were told, in plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_asyncpp.core.optimizers.configured import name_of

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
        found |= {f"{prefix}{key}": value for key, value in _told(scheduler, state).items()}
    return found


def _told(scheduler: Any, state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Its plain entries, and those of schedulers in it, which are a list."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            for index, (inner, of_inner) in enumerate(zip(getattr(scheduler, key, ()), value)):
                found |= _told(inner, of_inner, f"{prefix}{index}: ")
        elif key == "_milestones":
            found[f"{prefix}milestones"] = value
        elif key not in _OF_GROUPS and not key.startswith("_") and (shared := _of_all_groups(scheduler, value)):
            found[f"{prefix}{key}"] = shared[0]
    return found


def _of_all_groups(scheduler: Any, value: Any) -> list[Any]:
    """What of an entry is no group's own, since stages have other groups: it; of one for every group what is equal."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    if not isinstance(value, (list, tuple)) or not value or len(value) != len(groups):
        return [value]
    is_torchs = type(scheduler).__module__.startswith("torch.")  # which has numbers there that all groups share
    return [[value[0]]] if is_torchs and all(other == value[0] for other in value) else []
