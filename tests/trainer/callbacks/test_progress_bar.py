"""The bar in a terminal of 80 columns: loss, throughput and bubble are there, and nothing is cut off."""

from __future__ import annotations

import fcntl
import gc
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_asyncpp import AsyncPipelineStrategy, PipelineProgressBar
from lightning_asyncpp.trainer import step_log

FIGURES = {
    "gradient_staleness_stage_17": 0.25, "val_loss": 2.5, "bubble": 0.21, "tokens_per_second": 123456.0, "mfu": 0.4,
}  # fmt: skip


class Logs(BoringModel):
    """Logs what a run of a language model shows, in another order."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for name, value in FIGURES.items():
            self.log(name, value, prog_bar=True)
        self.log("train_loss", 3.25, prog_bar=True)
        return super().training_step(batch, batch_idx)


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Print to a terminal, whose other end reads it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(master, False)
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        yield master
        monkeypatch.undo()
    os.close(master)


def all_of(master: int) -> Iterator[bytes]:
    """What the terminal has been given, in pieces."""
    with suppress(BlockingIOError):
        while True:
            yield os.read(master, 4096)


def lines(columns: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What the terminal shows of the training, one drawing after the other."""
    with terminal(columns, monkeypatch) as master:
        trainer = L.Trainer(
            accelerator="cpu", max_steps=12, limit_val_batches=1, val_check_interval=4, logger=True,
            default_root_dir=folder,
            enable_checkpointing=False, enable_model_summary=False, callbacks=[PipelineProgressBar()],
        )  # fmt: skip
        trainer.fit(Logs())
        sys.stdout.flush()
        text = b"".join(all_of(master)).decode()
    return [line for line in re.split(r"[\r\n]|\x1b\[A", text) if line.startswith("Epoch") and "=" in line]


@pytest.mark.filterwarnings("ignore")
def test_it_fits_80_columns_with_what_matters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = lines(80, monkeypatch, tmp_path)
    assert len(drawn) > 10
    for line in drawn:
        assert len(line) <= 80
        assert line.rstrip().endswith("]"), "nothing is cut off"
    assert "loss=3.250, tok/s=123k, bubble=21%" in drawn[-1]
    assert not any("v_num" in line or "staleness" in line for line in drawn)


@pytest.mark.filterwarnings("ignore")
def test_a_wide_terminal_shows_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    last = lines(200, monkeypatch, tmp_path)[-1]
    assert re.findall(r"([\w/]+)=", last)[:4] == ["loss", "tok/s", "bubble", "val"]
    assert "mfu=40%" in last
    assert "gradient_staleness_stage_17=0.2500" in last


class Fails(Logs):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise RuntimeError("a mistake")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_drawn_below_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(80, monkeypatch) as master:
        trainer = L.Trainer(
            accelerator="cpu", max_steps=12, logger=False, enable_checkpointing=False, enable_model_summary=False,
            callbacks=[PipelineProgressBar()],
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="a mistake"):
            trainer.fit(Fails())
        print("the last line")
        trainer.callbacks.clear()  # type: ignore[attr-defined]
        gc.collect()
        sys.stdout.flush()
        text = b"".join(all_of(master)).decode()
    assert "5/" in text
    assert text.rstrip().endswith("the last line")


class NotesTheBar(L.Callback):
    """Notes what the bar and other callbacks find after each batch, and at the end of the epoch."""

    def __init__(self) -> None:
        self.bars: list[dict[str, float]] = []
        self.others: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.bars.append(dict(trainer.progress_bar_metrics))  # type: ignore[arg-type]
        self.others.append(float(trainer.callback_metrics["loss"]))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.bars.append(dict(trainer.progress_bar_metrics))  # type: ignore[arg-type]


class LogsLoss(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 2))  # type: ignore[assignment]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("loss", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_a_value_that_comes_late_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows it a batch later; callbacks have it at once; the epoch's is there at its end."""
    monkeypatch.setattr(step_log, "_is_late", lambda value: True)
    noting = NotesTheBar()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=AsyncPipelineStrategy(microbatches=1), max_epochs=1, logger=False,
        limit_train_batches=4, limit_val_batches=0, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False, callbacks=[noting],
    )  # fmt: skip
    trainer.fit(LogsLoss())
    assert [bar.get("loss_step") for bar in noting.bars] == [None, 0.0, 1.0, 2.0, 2.0]
    assert noting.others == [0.0, 1.0, 2.0, 3.0]
    assert noting.bars[-1]["loss_epoch"] == 1.5
