"""The recipe with 10 billion parameters trains at its full depth, and each process allocates only its own stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.models import GPT, GPTConfig
from tests.helpers.programs import allocated
from tests.test_recipes import ROOT, run

STAGES = 16
RECIPE = ROOT / "recipes" / "moe_10b.yaml"


def narrow() -> GPT:
    """Return the model on the meta device, at full depth but an eighth of its width: about 150 million parameters."""
    config = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]["config"]
    moe = config["moe"] | {"expert_dim": 104}
    with torch.device("meta"):
        return GPT(GPTConfig(**config | {"dim": 256, "mlp_dim": 728, "context_length": 64, "moe": moe}))


def num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 15])
def test_a_process_allocates_its_own_stage_alone(stage: int, tmp_path: Path) -> None:
    made: list[Any] = []

    def build() -> None:
        model = narrow()
        counts = choose_partition(model, 0, STAGES, "auto").counts
        made.append(cut(model, stage, STAGES, 0, torch.device("cpu"), counts=counts))

    peak, kept = allocated(build, tmp_path / "events.json")
    own = num_bytes(made[0].model)
    largest = max(parameter.nbytes for parameter in made[0].parameters.values())
    assert own > 10 * 2**20
    assert own <= kept <= 1.02 * own
    assert peak <= own + 1.1 * largest  # a mask of each tensor is made, to check that it was initialised
    whole = sum(parameter.nbytes for parameter in narrow().parameters())
    assert peak < 0.15 * whole


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_stages_train_on_two_cores(tmp_path: Path) -> None:
    """The recipe trains in sixteen processes, with tiny layers."""
    overrides = {
        "trainer.accelerator": "cpu", "trainer.devices": 16, "trainer.num_nodes": 1, "trainer.max_steps": 3,
        "trainer.val_check_interval": 3, "trainer.limit_val_batches": 1, "trainer.num_sanity_val_steps": 0,
        "trainer.strategy.init_args.microbatches": 32, "model.init_args.config.vocab_size": 256,
        "model.init_args.config.context_length": 16, "model.init_args.config.dim": 32,
        "model.init_args.config.mlp_dim": 48, "model.init_args.config.moe.expert_dim": 16,
        "data.init_args.source": "stdlib", "data.init_args.context_length": 16, "data.init_args.batch_size": 32,
        "data.init_args.max_bytes": 2_000_000, "data.init_args.num_workers": 0,
        "data.init_args.cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in overrides.items()]
    printed = run("fit", "--config", str(RECIPE), *arguments, cwd=tmp_path, timeout=800)
    assert "Done. Checkpoint: " in printed
    (checkpoint,) = tmp_path.glob("runs/**/step=3*.ckpt")
    pipeline = torch.load(checkpoint, weights_only=True)["pipeline"]
    # Two blocks with experts cost most, and some stages must have two: here 13 do; 14 would if the head were alone.
    assert (pipeline["num_stages"], pipeline["partition"]) == (STAGES, [3, 1, *[2] * 14])
