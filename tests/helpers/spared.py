"""What Lightning and torch do anew for every Trainer and every seed, a fifth of the work of a short run: here once."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.fabric.utilities import registry

# Callbacks of other packages are looked for in the metadata of all that are installed.
if hasattr(registry, "entry_points"):
    registry.entry_points = functools.cache(registry.entry_points)
    registry.entry_points(group="lightning.pytorch.callbacks_factory")  # once for all that is forked from here

# For devices that are not there, torch writes down where they were given a seed.
if not Path("/dev/nvidiactl").exists():  # to ask torch would keep what is forked from here from forking in turn
    _WITHOUT_STACKS = SimpleNamespace(**{**vars(traceback), "format_stack": list})
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name, None)
        if hasattr(device, "traceback"):
            device.traceback = _WITHOUT_STACKS
