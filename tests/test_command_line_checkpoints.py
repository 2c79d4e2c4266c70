"""What the command makes of ``--ckpt_path``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_asyncpp import GPTModule
from lightning_asyncpp.cli import main
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.trainer.gpt_module import learning_rate_factor

SIZES = {"vocab_size": 256, "context_length": 32, "num_layers": 2, "dim": 16, "num_heads": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a recipe."""
    monkeypatch.chdir(tmp_path)
    model = {"class_path": "lightning_asyncpp.GPTModule", "init_args": {"config": SIZES, "warmup_steps": 1}}
    data = {"class_path": "lightning_asyncpp.data.TextDataModule", "init_args": {"source": "text"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    return tmp_path


def test_a_lightning_that_reads_checkpoints_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(LightningCLI, "_parse_ckpt_path")
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "recipe.yaml"])
    assert end.value.code == 1
    assert "_parse_ckpt_path" in capsys.readouterr().err


def test_a_run_is_made_longer(tmp_path: Path) -> None:
    """With the rest of the other schedule."""
    (tmp_path / "text").mkdir()
    for index in range(8):
        (tmp_path / "text" / f"{index}.txt").write_text("some text\n" * 100)
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.max_epochs=-1"]
    saving = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=."]
    data = ["--data.init_args.context_length=32", "--data.init_args.batch_size=2", "--data.init_args.val_fraction=0.3"]
    common = ["--config", "recipe.yaml", *trainer, "--trainer.limit_val_batches=0", *data, "--optimizer=AdamW"]
    saving += ["--trainer.callbacks.save_last=true", "--trainer.callbacks.every_n_train_steps=1"]
    common = [*common, *saving, "--trainer.enable_progress_bar=false", "--optimizer.lr=1.0"]
    main(["fit", *common, "--trainer.max_steps=2", "--model.init_args.total_steps=2"])
    main(["fit", *common, "--trainer.max_steps=4", "--model.init_args.total_steps=9", "--ckpt_path=last.ckpt"])
    content = torch.load("last.ckpt", weights_only=True)
    assert content["global_step"] == 4
    assert content["hyper_parameters"]["total_steps"] == 9
    module = GPTModule(GPTConfig(**SIZES), warmup_steps=1, total_steps=9)
    assert content["lr_schedulers"][0]["_last_lr"] == [learning_rate_factor(module)(4)]
