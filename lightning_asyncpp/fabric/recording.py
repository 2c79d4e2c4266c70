"""Recording what the stages do, from a Fabric loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lightning_asyncpp.fabric import refusals
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.recording.recorder import Recorder, Window
from lightning_asyncpp.pipeline.session import PipelineSession


class RecordingMixin:
    """Gives a strategy that holds a session its ``record_trace``."""

    session: PipelineSession
    _recorder: Recorder | None = None

    def record_trace(self, dirpath: str | Path, first_mini_batch: int = 0, mini_batches: int | None = None) -> Recorder:
        """Record from here on what every stage does when, for ``asyncpp trace``; a collective call.

        What passes between ``optimizer.step()`` and the next ``training_step`` counts as waiting for data.

        Args:
            dirpath: folder of the files, one per process; with a recording in it the next goes to ``<dirpath>-2``, ...
            first_mini_batch: the first mini-batch to record, counted over the run from 0.
            mini_batches: how many to record; default: all that follow.

        Returns:
            The recording: its ``close()``, the end of a ``with`` block, or the end of the process ends the files.

        Raises:
            ConfigurationError: on every rank; an argument makes no sense, or a rank cannot write there.
        """
        if self.session.optimizer is None:
            raise ConfigurationError(refusals.not_set_up("strategy.record_trace()"))
        self._end_recording()
        self._recorder = Recorder(self.session, Path(dirpath), Window(first_mini_batch, mini_batches))
        return self._recorder

    def _evaluation_recorded(self) -> AbstractContextManager[None]:
        return self._recorder.evaluating() if self._recorder is not None else nullcontext()

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
