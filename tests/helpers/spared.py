"""Patches that avoid work repeated by Lightning and torch for every Trainer and seed: a fifth of a short run."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.fabric.utilities import registry

# For every Trainer, Lightning searches the metadata of all installed packages for callbacks.
if hasattr(registry, "entry_points"):
    registry.entry_points = functools.cache(registry.entry_points)
    registry.entry_points(group="lightning.pytorch.callbacks_factory")  # cached for all processes forked from this one

# For devices that do not exist, torch records the call stack of every seeding.
if not Path("/dev/nvidiactl").exists():  # asking torch would leave forked processes unable to fork
    _WITHOUT_STACKS = SimpleNamespace(**{**vars(traceback), "format_stack": list})
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name, None)
        if hasattr(device, "traceback"):
            device.traceback = _WITHOUT_STACKS
