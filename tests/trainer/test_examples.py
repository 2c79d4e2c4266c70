"""Models that are not ours, as the documents' examples cut them: trained by their scripts, equal to the oracle."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.reference import train_reference
from tests.helpers.oracle import assert_equal_weights, joined_parts, joined_weights
from tests.helpers.pool import Pools
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
    }


def reference(
    module: Any, loader: Any, optimizer: torch.optim.Optimizer, results: list[dict[str, Any]], **how: Any
) -> None:
    """Train the module of an example in this process, whole, by its own forward; ``results`` say what a stage held."""
    named = dict(module.named_parameters())
    # Rank r is stage P - 1 - r, which runs the first r microbatches on the older weights.
    held = [([named[name] for name in result["weights"]], rank) for rank, result in enumerate(results)]
    how |= {"held": held, "synchronous_start": 1}
    module.log = lambda *args, **kwargs: None
    weight = {"weight": module.microbatch_weight} if hasattr(module, "microbatch_weight") else {}
    batches = [[batch] for batch in loader]
    train_reference(module.model, lambda mb: module.training_step(mb, 0), batches, optimizer, seed=1, **weight, **how)


def llama_reference(results: list[dict[str, Any]], steps: int, pretrained: str | None = None) -> nn.Module:
    script = example("transformers_llama")
    L.seed_everything(1, verbose=False)
    module = script.build(pretrained)
    optimizer = MuonAdamW(list(module.named_parameters()), lr=module.lr)
    loader = script.loader(64, 16 * steps)
    reference(module, loader, optimizer, results, microbatches=4, max_norm=1.0, error_feedback=1.0)
    return module


def test_a_llama_of_transformers(pools: Pools, tmp_path: Path) -> None:
    """With Muon, Error Feedback, clipping, padding and a validation; it goes to transformers and comes back."""
    transformers = pytest.importorskip("transformers")
    folder = str(tmp_path / "llama")
    results = pools.run(3, run_main, "transformers_llama", {"devices": 3, "steps": 4, "save": folder})
    expected = llama_reference(results, 4)
    assert_equal_weights(joined_weights(results, 3), arrays(dict(expected.named_parameters())))
    assert results[0]["metrics"]["val_loss"] == results[1]["metrics"]["val_loss"] < 5.6, "above a uniform guess"
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_equal_weights(arrays(loaded.state_dict()), arrays(expected.model.state_dict()))
    again = pools.run(3, run_main, "transformers_llama", {"devices": 3, "steps": 1, "pretrained": folder})
    expected = llama_reference(again, 1, pretrained=folder)
    assert_equal_weights(joined_weights(again, 3), arrays(dict(expected.named_parameters())))


def test_a_resnet_of_torchvision(pools: Pools) -> None:
    """Weights, and the running statistics of every BatchNorm, which validation uses."""
    pytest.importorskip("torchvision")
    results = pools.run(2, run_main, "torchvision_resnet", {"devices": 2, "steps": 4})
    script = example("torchvision_resnet")
    L.seed_everything(1, verbose=False)
    module = script.Classifier()
    reference(module, script.loader(64, 0), module.configure_optimizers(), results, microbatches=2)
    assert_equal_weights(joined_weights(results, 2), arrays(dict(module.named_parameters())))
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
    """As a user runs them: processes are started by the script."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--devices", "2", "--steps", "8", "--accelerator", "cpu"]
    done = subprocess.run(["timeout", "-k", "5", "240", *command], capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stderr
    assert "val_loss" in done.stdout or "accuracy" in done.stdout
