"""A progress bar that fits a terminal of 80 columns: loss, tokens per second and bubble first."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm

_SHORT = {"train_loss": "loss", "tokens_per_second": "tok/s", "val_loss": "val"}
_FIRST = ("loss", "tok/s", "bubble", "val")
_LEAST_BAR = 8
_TQDMS_BAR = 10
"""Columns of a bar in a line without a width."""


class PipelineProgressBar(TQDMProgressBar):
    """Lightning's bar with short names: ``loss`` for ``train_loss``, ``tok/s`` for ``tokens_per_second``; shares in %.

    What there is no room for is left out, from the end: loss, throughput and bubble come first, then the validation's
    loss, then what else is logged with ``prog_bar=True``. The number of the version and the batches per second are not
    shown. ``asyncpp fit`` uses it where a recipe names no other bar.

    Args:
        refresh_rate: batches from one drawing to the next.
        process_position: lines above that belong to others.
        leave: leave the bar of every epoch behind.
    """

    BAR_FORMAT = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def get_metrics(
        self, trainer: L.Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What is shown beside the bar, in its order."""
        shown = {_SHORT.get(name, name): _text(name, value) for name, value in trainer.progress_bar_metrics.items()}
        ordered = {name: shown[name] for name in (*_FIRST, *shown) if name in shown}
        if trainer.state.fn == TrainerFn.FITTING:  # also in a validation of it, which ends with the training's bar
            ordered = _fitting(self.train_progress_bar, ordered)
        return {**ordered}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if name == "tokens_per_second":
        return tqdm.format_sizeof(value) if value >= 1000 else f"{value:.0f}"
    return f"{100 * value:.0f}%" if name in ("bubble", "mfu") else f"{value:#.4g}"


def _fitting(bar: tqdm, metrics: dict[str, str]) -> dict[str, str]:
    """As many metrics as the line has room for; all of them where it has no width, as in a file."""
    now = bar.format_dict
    if now["ncols"] is None:
        return metrics
    line = bar.format_meter(**{**now, "ncols": None, "postfix": ""})
    room = now["ncols"] - len(line) + _TQDMS_BAR - _LEAST_BAR
    fitting: dict[str, str] = {}
    for name, text in metrics.items():
        room -= len(f", {name}={text}")
        if room < 0:
            break
        fitting[name] = text
    return fitting
