"""Helpers that start programs as a user does, and read their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def run(script: str, folder: Path, *arguments: str) -> tuple[Any, str]:
    """Write a program to a folder and run it; return the JSON that it prints after ``RESULT``, and all its output."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT")), done.stdout + done.stderr


def tensors_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights and the optimizer state in a checkpoint; keys of the state contain parameter names."""
    found = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
    for saved in checkpoint["optimizer_states"]:
        names: dict[Any, str] = {}
        for group in saved["param_groups"]:
            names |= dict(zip(group["params"], group.get("param_names", group["params"]), strict=True))
        for key, state in saved["state"].items():
            for entry, value in state.items():
                if value is not None:
                    found[f"{entry} of {names.get(key, key)}"] = torch.as_tensor(value).clone()
    return found
