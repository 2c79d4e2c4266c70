"""The bar in a terminal of 80 columns: loss, throughput and bubble are there, and nothing is cut off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_asyncpp import PipelineProgressBar
from lightning_asyncpp.trainer import step_log
from tests.helpers.trainer import Net, Run, loader, make_trainer

FIGURES = {
    "gradient_staleness_stage_17": 0.25, "val_loss": 2.5, "bubble": 0.21, "tokens_per_second": 123456.0, "mfu": 0.4,
}  # fmt: skip


class Logs(BoringModel):
    """Logs what a run of a language model shows, in another order."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for name, value in {**FIGURES, "train_loss": 3.25}.items():
            self.log(name, value, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_it_fits_80_columns_with_what_matters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "81")  # of which tqdm leaves one free, where it writes to no terminal
    monkeypatch.setenv("LINES", "25")
    trainer = L.Trainer(
        accelerator="cpu", max_steps=12, limit_val_batches=1, val_check_interval=4, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[PipelineProgressBar()],
    )  # fmt: skip
    trainer.fit(Logs())
    lines = re.split(r"[\r\n]|\x1b\[A", capsys.readouterr().out)
    drawn = [line for line in lines if line.startswith("Epoch") and "=" in line]
    assert len(drawn) > 10
    for line in drawn:
        assert len(line) <= 80
        assert line.rstrip().endswith("]"), "nothing is cut off"
    assert "loss=3.250, tok/s=123k, bubble=21%" in drawn[-1]
    assert not any("v_num" in line or "staleness" in line for line in drawn)


class LogsItsNumber(Net):
    """Notes what the bar and callbacks find after each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.found: list[tuple[Any, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        trainer = self.trainer
        self.found.append((trainer.progress_bar_metrics.get("number_step"), float(trainer.callback_metrics["number"])))


def test_a_value_that_comes_late_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows it a batch later; callbacks have it at once; the epoch's is there at its end."""
    monkeypatch.setattr(step_log, "_is_late", lambda value: True)
    run = Run(LogsItsNumber, samples=32)
    module, trainer = LogsItsNumber(run), make_trainer(run)
    trainer.fit(module, loader(run))
    assert module.found == [(None, 0.0), (0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert trainer.progress_bar_metrics["number_epoch"] == 1.5
