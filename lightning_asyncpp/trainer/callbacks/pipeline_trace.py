"""Callback that records the timeline of every stage of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_asyncpp.core.trace import Activity, Wait
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.recording import Recorder
from lightning_asyncpp.trainer.base import PipelineStrategy

FOLDER = "trace"


class PipelineTrace(L.Callback):
    """Callback that records the forwards, backwards, updates and waits of every stage in every ``fit``.

    Each process writes a file, without communication during the training; ``asyncpp trace FOLDER`` shows the files
    together. If the folder has a recording already, the new one goes to ``<folder>-2``, ...

    Args:
        dirpath: folder of the files; ``None``: ``trace`` in the logger's folder or, without a logger, in
            ``default_root_dir``.
        first_mini_batch: first mini-batch to record, counted over the run from 0.
        mini_batches: number of mini-batches to record; ``None``: all that follow. A file grows by about 0.7 kB per
            microbatch, on middle stages by 1 kB.

    Attributes:
        folder: folder of the newest recording; ``None`` before the first.

    Raises:
        ConfigurationError: the strategy is not a pipeline strategy, or a rank cannot write to the folder.
    """

    def __init__(self, dirpath: str | None = None, first_mini_batch: int = 0, mini_batches: int | None = None) -> None:
        self.dirpath, self.first_mini_batch, self.mini_batches = dirpath, first_mini_batch, mini_batches
        self.folder: Path | None = None
        self._recorder: Recorder | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a strategy that has no stages."""
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise ConfigurationError(
                f"PipelineTrace records the stages of a pipeline, but {type(trainer.strategy).__name__} has none; use"
                " strategy='async_pipeline' or 'sync_pipeline', or leave the callback out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the files; a collective call."""
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        default = Path(trainer.log_dir or trainer.default_root_dir) / FOLDER
        folder = Path(self.dirpath) if self.dirpath else default
        self._recorder = Recorder(strategy.session, folder, self.first_mini_batch, self.mini_batches)
        self.folder = self._recorder.folder
        rank_zero_info(f"The pipeline's trace goes to {self.folder}; look at it with: asyncpp trace {self.folder}")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the start of the batch."""
        if self._recorder is not None:
            self._recorder.begin_batch()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end of the batch."""
        if self._recorder is not None:
            self._recorder.end_batch()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the wait for data, since no data is fetched at the end of an epoch."""
        if self._recorder is not None:
            self._recorder.end_pause()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Label the pause until the next batch as time for a checkpoint, not as a wait for data."""
        if self._recorder is not None:
            self._recorder.note_checkpoint()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the start of a validation."""
        if self._recorder is not None:
            self._recorder.begin_pause(Activity.EVALUATE)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the end of a validation."""
        if self._recorder is not None:
            self._recorder.begin_pause(Wait.DATA)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the files."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the files, which keep what was recorded before the failure."""
        self._close()

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
