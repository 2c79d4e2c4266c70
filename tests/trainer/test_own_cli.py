"""A user's own ``LightningCLI`` with ``--optimizer``, in processes of its own, on one stage and on several."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "own_cli_script.py"
OPTIMIZERS = {
    "AdamW": ["--optimizer=AdamW", "--optimizer.lr=0.01"],
    "SGD": ["--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.9"],
    "MuonAdamW": [
        "--optimizer=lightning_asyncpp.optim.MuonAdamW",
        "--optimizer.lr=0.02",
        "--optimizer.newton_schulz_dtype=float32",
    ],
}
SCHEDULER = ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=3"]


def trained(folder: Path, optimizer: str, strategy: list[str], devices: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    script = shutil.copy(SCRIPT, folder / "train.py")  # as a user has it: beside nothing
    options = ["accelerator=cpu", "max_epochs=2", "logger=false", "enable_progress_bar=false", *strategy]
    command = [sys.executable, str(script), "fit", "--seed_everything=1", *OPTIMIZERS[optimizer], *SCHEDULER]
    command += [f"--trainer.{option}" for option in (*options, f"devices={devices}", "enable_model_summary=false")]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    saved: dict[str, torch.Tensor] = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    return saved


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        ("AdamW", 2),
        *(
            pytest.param(name, stages, marks=pytest.mark.slow)
            for name in OPTIMIZERS
            for stages in (1, 2, 3)
            if (name, stages) != ("AdamW", 2)
        ),
    ],
)
def test_optimizers_of_the_command_line(tmp_path: Path, optimizer: str, stages: int) -> None:
    sync = ["strategy=lightning_asyncpp.SyncPipelineStrategy", "strategy.microbatches=2"]
    found = trained(tmp_path / "stages", optimizer, sync, stages)
    if optimizer == "MuonAdamW":  # a plain Trainer gives it no names
        expected = trained(tmp_path / "one", optimizer, sync, 1)
    else:
        expected = trained(tmp_path / "plain", optimizer, [], 1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_an_asynchronous_pipeline_trains(tmp_path: Path) -> None:
    trained(tmp_path / "async", "MuonAdamW", ["strategy=async_pipeline"], 2)
