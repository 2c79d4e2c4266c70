"""In an interactive session: the strategies named ``..._notebook`` train there."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from tests.helpers import forked

# As a cell of a notebook: a class that no file has, and sys.ps1, by which Lightning knows a session.
CELL = """
import sys
sys.ps1 = ">>> "
import lightning as L, torch
import lightning_asyncpp
from tests.trainer.launching.net import Net as Base, loader

class Net(Base):
    pass

def train(strategy, devices=2, changed=lambda module: None):
    module = Net()
    changed(module)
    trainer = L.Trainer(
        devices=devices, strategy=strategy, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(module, loader())
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    return all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
"""


def said_by(cell: str, folder: Path, interactive: bool = True) -> str:
    """What a session prints; it ends with an error as with a success."""
    code = CELL if interactive else CELL.replace('sys.ps1 = ">>> "\n', "")
    done = forked.run(("-c", code + cell, str(folder)), folder)
    return done.stdout + (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("name", ["async_pipeline_notebook", "sync_pipeline_notebook"])
def test_the_names_stand_for_forked_processes(name: str) -> None:
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        assert registry[name]["init_params"] == {"start_method": "fork"}
        assert registry[name]["strategy"] is registry[name.removesuffix("_notebook")]["strategy"]


def test_a_session_trains_on_one_device_and_on_two(tmp_path: Path) -> None:
    cell = 'print([train("async_pipeline_notebook", devices) for devices in (1, 2)], train("sync_pipeline_notebook"))'
    assert "[True, True] True" in said_by(cell, tmp_path)


SPAWN = 'lightning_asyncpp.AsyncPipelineStrategy(start_method="spawn")'


@pytest.mark.slow
def test_what_cannot_be_spawned_is_refused_in_one_line(tmp_path: Path) -> None:
    said = said_by(f"train({SPAWN})", tmp_path, interactive=False)
    assert "start_method='spawn': Net is defined at a prompt or in a notebook" in said
    module = "Net.__module__ = 'tests.trainer.launching.net'\n"
    cell = module + f"def changed(module):\n    module.wrong = lambda: None\ntrain({SPAWN}, changed=changed)"
    said = said_by(cell, tmp_path, interactive=False)
    assert "ConfigurationError: start_method='spawn' sends the module" in said
    assert "pickle" in said
