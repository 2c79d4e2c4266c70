"""The scripts in ``examples/`` train third-party models to the same weights as the reference."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.reference import train_reference
from tests.helpers.oracle import assert_equal_weights, joined_parts, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import arrays, own_state, plain_metrics

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Import an example as a module."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def run_main(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run an example's ``main``, which returns its Trainer; return this rank's weights, buffers and metrics."""
    trainer = example(name).main(**arguments, accelerator="cpu")
    module = trainer.lightning_module
    return {
        "weights": arrays(dict(module.named_parameters())),
        "buffers": {name.removeprefix("model."): array for name, array in own_state(module).items()},
        "metrics": plain_metrics(trainer),
    }


def reference(module: Any, loader: Any, optimizer: Any, results: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    """Train an example's module in this process, and return its weights; ``results`` show each stage's parameters."""
    named = dict(module.named_parameters())
    # Rank r is stage P - 1 - r, which runs the first r microbatches on the older weights.
    stale_counts = [([named[name] for name in result["weights"]], rank) for rank, result in enumerate(results)]
    module.log = lambda *args, **kwargs: None
    if hasattr(module, "microbatch_weight"):
        how["weight"] = module.microbatch_weight
    batches = [[batch] for batch in loader]
    how |= {"stale_counts": stale_counts, "synchronous_start": 1, "seed": 1}
    train_reference(module.model, lambda mb: module.training_step(mb, 0), batches, optimizer, **how)
    return arrays(named)


def test_a_llama_of_transformers(pools: Pools, tmp_path: Path) -> None:
    """A Llama trains as the reference, with Muon, Error Feedback, clipping, padding and validation, and is reloaded."""
    pytest.importorskip("transformers")
    results = pools.run(2, run_main, "transformers_llama", {"devices": 2, "steps": 3, "save": str(tmp_path)})
    script = example("transformers_llama")
    L.seed_everything(1, verbose=False)
    module = script.build()
    optimizer, loader = MuonAdamW(list(module.named_parameters()), lr=module.lr), script.loader(64, 16 * 3)
    expected = reference(module, loader, optimizer, results, microbatches=4, max_norm=1.0, error_feedback=1.0)
    assert_equal_weights(joined_weights(results, 2), expected)
    assert results[0]["metrics"]["val_loss"] == results[1]["metrics"]["val_loss"] < 5.6, "above a uniform guess"
    assert_equal_weights(arrays(dict(script.build(str(tmp_path)).named_parameters())), expected)


@pytest.mark.slow
def test_a_resnet_of_torchvision(pools: Pools) -> None:
    """Weights and the running statistics of every BatchNorm, which validation uses, equal those of the reference."""
    pytest.importorskip("torchvision")
    results = pools.run(2, run_main, "torchvision_resnet", {"devices": 2, "steps": 4})
    script = example("torchvision_resnet")
    L.seed_everything(1, verbose=False)
    module = script.Classifier()
    expected = reference(module, script.loader(64, 0), module.configure_optimizers(), results, microbatches=2)
    assert_equal_weights(joined_weights(results, 2), expected)
    buffers = joined_parts([result["buffers"] for result in results])
    assert_equal_weights(buffers, arrays(module.model.state_dict()))
    assert int(buffers["bn1.num_batches_tracked"]) == 4 * 2, "every microbatch counts"
    images, classes = script.striped_images(64, 1).tensors
    with torch.no_grad():
        right = (module.eval().model(images).argmax(dim=1) == classes).float().mean()
    np.testing.assert_allclose(results[0]["metrics"]["accuracy"], float(right))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers_llama", "torchvision_resnet"])
def test_the_scripts(name: str) -> None:
    """The scripts start their processes themselves, as when a user runs them."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--devices", "2", "--steps", "8", "--accelerator", "cpu"]
    done = subprocess.run(["timeout", "-k", "5", "240", *command], capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stderr
    assert "val_loss" in done.stdout or "accuracy" in done.stdout
