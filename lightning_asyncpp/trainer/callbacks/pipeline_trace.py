"""A callback that records what every stage of a pipeline does when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_asyncpp.core.trace import Beside, Wait
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.recording import Recorder
from lightning_asyncpp.trainer.base import PipelineStrategy

FOLDER = "trace"


class PipelineTrace(L.Callback):
    """Records what every stage does in every ``fit``: forwards, backwards, updates, and what they waited for.

    Each process writes a file of its own; ``asyncpp trace FOLDER`` shows them together. Nothing is exchanged between
    processes while they train. With files of an earlier recording in the folder, the next goes to ``<folder>-2``, ...

    Args:
        dirpath: folder of the files; default: ``trace`` in the logger's folder, else in ``default_root_dir``.
        first_mini_batch: the first mini-batch to record, counted over the run from 0.
        mini_batches: how many to record; default: all that follow. A file grows by about 200 bytes per microbatch.

    Attributes:
        folder: where the newest recording is; ``None`` before the first.

    Raises:
        ConfigurationError: the strategy is none of a pipeline's.
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
        """Tell that the batch is there."""
        if self._recorder is not None:
            self._recorder.begin_batch()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell that the batch is over."""
        if self._recorder is not None:
            self._recorder.end_batch()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An epoch's end is no time in which data is fetched."""
        if self._recorder is not None:
            self._recorder.end_pause()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Tell what the time until the next batch goes for."""
        if self._recorder is not None:
            self._recorder.note_checkpoint()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave validations out."""
        if self._recorder is not None:
            self._recorder.begin_pause(Beside.EVALUATE)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on."""
        if self._recorder is not None:
            self._recorder.begin_pause(Wait.DATA)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the files."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Keep what was recorded until a failure."""
        self._close()

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
