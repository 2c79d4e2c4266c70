"""A plan for a GPU predicts the peak memory that torch allocates there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.plan.devices import DEVICES
from lightning_asyncpp.tools.plan.estimate import Estimate
from lightning_asyncpp.tools.plan.recipe import build
from tests.gpu.scripts import run
from tests.tools.plan.cases import ADAMW, MUON, Case, feedback

GPT: dict[str, Any] = {"vocab_size": 8000, "context_length": 512, "num_layers": 6, "dim": 512, "num_heads": 8}
DELAYED: dict[str, Any] = {"microbatches": 4, "staleness": "uniform"}
CASES = {
    "synchronous": Case(1, GPT, ADAMW, 16, {"microbatches": 4}),
    "adamw": Case(1, GPT, ADAMW, 16, DELAYED),
    "mixed": Case(1, GPT, feedback(MUON), 16, DELAYED, precision="bf16-mixed"),
    "bf16-versions": Case(1, GPT, feedback(ADAMW), 16, {**DELAYED, "weight_dtype": "bf16"}, precision="bf16-mixed"),
    "checkpointed": Case(
        1, GPT, ADAMW, 16, DELAYED, precision="bf16-mixed", model={"activation_checkpointing": "block"}
    ),
}
SCRIPT = """
import json, sys
import torch
from lightning_asyncpp.cli import main
main(["fit", "--config", sys.argv[1]])
print("RESULT" + json.dumps(torch.cuda.max_memory_allocated()))
"""


@pytest.mark.parametrize("name", CASES)
def test_torch_hands_out_what_was_planned(name: str, tmp_path: Path) -> None:
    recipe = CASES[name].recipe()
    recipe["trainer"]["accelerator"] = "gpu"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    plan = build(read_configuration(["fit", "--config", str(path)]))
    (memory,) = Estimate(plan, DEVICES["h100"]).memory
    taken, _ = run(SCRIPT, tmp_path, str(path))
    assert memory.total == pytest.approx(taken, rel=0.1)
