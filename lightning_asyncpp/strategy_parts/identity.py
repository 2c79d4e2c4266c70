"""Sections of a run's manifest that both frameworks' strategies have: versions, arguments, the model."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import fields
from typing import Any

from torch import nn

from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.private_names import installed_versions
from lightning_asyncpp.strategy_parts.arguments import PipelineArguments
from lightning_asyncpp.version import __version__

_PACKAGES = ("lightning", "torch")
_SHARED = ("state_dict_type", "async_checkpoints", "inexact_resume", "timeout")
SEED_OF_RANK_0 = (
    "{}. The pipeline's weights and random numbers are made of rank 0's, and what a script draws by itself of each"
    " rank's own"
)
"""Of a warning."""
_OF_A_PROCESS = re.compile(r" at 0x[0-9a-f]+|(?<=cuda):\d+")


def versions() -> dict[str, Any]:
    """Package -> version, of those that decide what is computed and what is sent."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, "lightning_asyncpp": __version__, **installed_versions(_PACKAGES)}


def arguments_of(strategy: object, arguments: PipelineArguments, settings: PipelineSettings) -> dict[str, Any]:
    """The arguments of a strategy that all ranks share, and its name."""
    shared = {name: getattr(arguments, name) for name in _SHARED if hasattr(arguments, name)}
    chosen = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {"strategy": type(strategy).__name__, **chosen, **shared}


def seed_section() -> dict[str, Any]:
    """What ``seed_everything`` was given, if it was called."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return {} if given is None else {"seed_everything": given}


def described_model(model: nn.Module) -> dict[str, Any]:
    """A whole model as torch prints it, and its size; of a model that cannot be printed the size alone."""
    found = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        return {**found, "layers": _OF_A_PROCESS.sub("", repr(model))}
    except Exception:  # a layer's own extra_repr
        return found
