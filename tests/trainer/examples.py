"""The examples of the documents: found by their files, and run on the ranks of a pool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.trainer import arrays, own_state, plain_metrics

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run_main(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run an example's ``main``, which returns its Trainer; what its model ended with on this rank."""
    trainer = example(name).main(**arguments, accelerator="cpu")
    module = trainer.lightning_module
    return {
        "weights": arrays(dict(module.named_parameters())),
        "buffers": {name.removeprefix("model."): array for name, array in own_state(module).items()},
        "metrics": plain_metrics(trainer),
        "global_step": trainer.global_step,
    }
