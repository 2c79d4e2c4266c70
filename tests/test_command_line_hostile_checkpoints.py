"""The command treats checkpoints as data, and runs no code that they contain or name."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_asyncpp.cli import main
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.strategy_parts.mixin import DurableCheckpointIO
from tests.helpers.models import write_texts
from tests.storage.saves import Evil
from tests.test_command_line_arguments import SIZES

QUIET = [
    "accelerator=cpu", "devices=1", "strategy=async_pipeline", "logger=false", "enable_checkpointing=false",
    "enable_progress_bar=false",
]  # fmt: skip


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path that exists only after the module ``trap`` was imported or code was unpickled."""
    mark = tmp_path / "sprung"
    (tmp_path / "trap.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model:\n    pass\n")
    model = {"class_path": "lightning_asyncpp.GPTModule", "init_args": {"config": SIZES, "warmup_steps": 1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": model}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("trap", None)
    return mark


def validate(tmp_path: Path) -> None:
    write_texts(tmp_path / "text", 8)
    data = ["--data=lightning_asyncpp.data.TextDataModule", "--data.source=text", "--data.context_length=32"]
    data += ["--data.batch_size=2", "--data.val_fraction=0.3"]
    trainer = [f"--trainer.{option}" for option in QUIET]
    main(["validate", "--config=recipe.yaml", "--ckpt_path=x.ckpt", *data, *trainer, "--trainer.limit_val_batches=1"])


def content(**hyper_parameters: Any) -> dict[str, Any]:
    weights = {f"model.{name}": weight for name, weight in GPT(GPTConfig(**SIZES)).state_dict().items()}
    saved = {"config": asdict(GPTConfig(**SIZES)), **hyper_parameters}
    version = {"pytorch-lightning_version": "2.6.0", "epoch": 0, "global_step": 1}
    return {"state_dict": weights, "hyper_parameters": saved, **version}


@pytest.mark.parametrize(
    "named",
    [{"_class_path": "trap.Model"}, {"optimizer": {"class_path": "trap.Model"}}, {"_instantiator": "trap.Model"}],
)
def test_hyper_parameters_that_name_a_class(trap: Path, tmp_path: Path, named: dict[str, Any]) -> None:
    """The recipe's model loads the weights, and classes that the hyperparameters name are not imported."""
    torch.save(content(**named), "x.ckpt")
    validate(tmp_path)
    assert not trap.exists()


def test_a_file_that_holds_code(trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({**content(), "more": Evil(trap)}, "x.ckpt")
    with pytest.raises(SystemExit):
        validate(tmp_path)
    assert "x.ckpt cannot be read without running code that it may hold" in capsys.readouterr().err
    assert not trap.exists()


def test_a_file_of_a_url_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files at URLs are loaded with ``weights_only=True`` by default; by Lightning's default, their code would run."""
    asked = []
    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", lambda self, *arguments: asked.append(arguments))
    for weights_only in (None, True, False):
        DurableCheckpointIO().load_checkpoint("memory://x.ckpt", weights_only=weights_only)
    assert [weights_only for *_, weights_only in asked] == [True, True, False]
