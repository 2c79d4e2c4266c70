"""In an interactive session: the strategies named ``..._notebook`` train there."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import programs as forked

# As a cell of a notebook: a class that no file has, and sys.ps1, by which Lightning knows a session.
CELL = """
import sys
sys.ps1 = ">>> "
import lightning as L, torch
import lightning_asyncpp
from tests.helpers.trainer import Net as Base, Run, loader

class Net(Base):
    pass

def train(strategy, devices):
    module, run = Net(Run(Net)), Run(Net, samples=16)
    trainer = L.Trainer(
        devices=devices, strategy=strategy, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(module, loader(run))
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    return all(torch.equal(saved[name], value) for name, value in module.state_dict().items())

print([train("async_pipeline_notebook", devices) for devices in (1, 2)], train("sync_pipeline_notebook", 2))
"""


def test_a_session_trains_on_one_device_and_on_two(tmp_path: Path) -> None:
    done = forked.run(("-c", CELL, str(tmp_path)), tmp_path)
    assert "[True, True] True" in done.stdout, done.stderr
