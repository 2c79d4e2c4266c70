"""The terminal shows a progress bar that fits 80 columns, and a table of the stages with their costs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_asyncpp import PipelineProgressBar
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.trainer import step_log
from lightning_asyncpp.trainer.callbacks.terminal import StageSummary, show_stages, stage_table
from tests.helpers.trainer import Net, Run, loader, make_trainer

FIGURES = {
    "gradient_staleness_stage_17": 0.25, "val_loss": 2.5, "bubble": 0.21, "tokens_per_second": 123456.0, "mfu": 0.4,
}  # fmt: skip


class Logs(BoringModel):
    """Module that logs the metrics of a language model, in another order than the bar shows them."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for name, value in {**FIGURES, "train_loss": 3.25}.items():
            self.log(name, value, prog_bar=True)
        return super().training_step(batch, batch_idx)


def all_of(terminal: int) -> Iterator[bytes]:
    """Yield the output that a terminal has received, in pieces."""
    with suppress(BlockingIOError):
        while True:
            yield os.read(terminal, 4096)


@pytest.mark.filterwarnings("ignore")
def test_it_fits_80_columns_with_what_matters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.set_blocking(master, False)
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        trainer = L.Trainer(
            accelerator="cpu", max_steps=12, limit_val_batches=1, val_check_interval=4, default_root_dir=tmp_path,
            enable_checkpointing=False, enable_model_summary=False, callbacks=[PipelineProgressBar()],
        )  # fmt: skip
        trainer.fit(Logs())
        screen.flush()
        monkeypatch.undo()
        text = b"".join(all_of(master)).decode()
    os.close(master)
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[A", text) if line.startswith("Epoch") and "=" in line]
    assert len(drawn) > 10
    for line in drawn:
        assert len(line) <= 80
        assert line.rstrip().endswith("]"), "nothing is cut off"
    assert "loss=3.250, tok/s=123k, bubble=21%" in drawn[-1]
    assert not any("v_num" in line or "staleness" in line for line in drawn)


class NotesTheBar(L.Callback):
    """Callback that records the values that the bar and callbacks have after each batch."""

    def __init__(self) -> None:
        self.bars: list[float | None] = []
        self.others: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.bars.append(trainer.progress_bar_metrics.get("number_step"))  # type: ignore[arg-type]
        self.others.append(float(trainer.callback_metrics["number"]))


class LogsItsNumber(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_a_value_that_comes_late_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows a late value a batch later, callbacks have it at once, and the epoch value is there at the end."""
    monkeypatch.setattr(step_log, "_is_late", lambda value: True)
    noting, run = NotesTheBar(), Run(LogsItsNumber)
    trainer = make_trainer(run, limit_train_batches=4, val_check_interval=2, callbacks=[noting])
    trainer.fit(LogsItsNumber(run), loader(run), loader(run))
    assert noting.bars == [None, 0.0, 1.0, 2.0]
    assert noting.others == [0.0, 1.0, 2.0, 3.0]
    assert trainer.progress_bar_metrics["number_epoch"] == 1.5


def table_of(model: nn.Module, replicas: int = 1, asked: Any = "auto") -> tuple[list[list[str]], str]:
    """Return the cells of the table of two stages, and the line about ranks below it."""
    partition = choose_partition(model, 0, 2, asked)
    whole = WholeModel.of(pipeline_units(model), partition.counts)
    session: Any = SimpleNamespace(whole_model=whole, partition=partition, mesh=Mesh(2, replicas, 0))
    lines = stage_table(session, model).splitlines()[1:]
    (ranks,) = (line for line in lines if line.startswith("A rank is"))
    return [re.split(r"  +", line.strip()) for line in lines if line != ranks and not line.startswith("-")], ranks


def test_a_gpt_is_told_in_operations_per_token() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=4, dim=32, num_heads=2))
    (titles, first, second, total), last = table_of(model, replicas=2)
    assert titles == ["stage", "ranks", "layers", "names", "parameters", "FLOPs/token", "of cost"]
    assert first[:4] == ["0", "1, 3", "3", "embedding to blocks.1"]
    assert second[:4] == ["1", "0, 2", "3", "blocks.2 to head"]
    assert total[:2] == ["all", "6"]
    shares = [float(row[-1].rstrip(" %")) for row in (first, second, total)]
    assert shares[0] + shares[1] == pytest.approx(shares[2], abs=0.11) == 100.0
    costs = model.pipeline_costs()
    assert shares[0] == pytest.approx(100 * sum(costs[:3]) / sum(costs), abs=0.05)
    assert "Rank 0 runs stage 1 of the first replica, which computes the loss" in last
    assert "Batches enter at stage 0, on rank 1." in last


def test_without_costs_there_are_parameters_alone() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 20, bias=False))
    (titles, *rows, frozen), _ = table_of(model, asked="uniform")
    assert titles == ["stage", "ranks", "layers", "names", "parameters"]
    assert [row[-1].strip() for row in rows] == ["100", "200", "300"]
    assert frozen == ["100 of the parameters are frozen."]


def test_it_takes_the_place_of_the_default_summary_alone() -> None:
    other = object()
    for given, left in (
        ([other, RichModelSummary()], [other, StageSummary]),
        ([ModelSummary(max_depth=2), other], [StageSummary, other]),
        ([other], [other]),
    ):
        trainer: Any = SimpleNamespace(callbacks=given)
        show_stages(trainer)
        show_stages(trainer)
        assert [StageSummary if isinstance(c, StageSummary) else c for c in trainer.callbacks] == left
