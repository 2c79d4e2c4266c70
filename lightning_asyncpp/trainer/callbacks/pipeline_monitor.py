"""Throughput of a run and utilisation of its pipeline over the last batches, for the progress bar and the logger."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_asyncpp.core.ranks.agreement import all_gather_object
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.trace import HOST, Clock, Moment, Reader, Span, utilisation
from lightning_asyncpp.data.replica import replica_of
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.recording import follow
from lightning_asyncpp.trainer.base import PipelineStrategy

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
_IN_BAR = ("tokens_per_second", "mfu", "bubble")
_GB = 1e9


class _Batch(NamedTuple):
    """Start and end of a batch, its tokens over all replicas, and the stage's spans (timed actions) until its end."""

    since: float
    until: float
    tokens: float
    spans: list[Span]


class PipelineMonitor(L.Callback):
    """Callback that logs throughput and the utilisation of the pipeline, averaged over the last batches.

    ``docs/guides/tracing.md`` lists the values. Rank 0, the last stage of the first replica, measures only itself; the
    peak memory of the stages, on GPUs after each validation and epoch, is the only value that needs communication.

    Args:
        window: number of batches that are averaged.
        every_n_batches: number of batches between two logs; on the last stage, logging costs more time than measuring.
        peak_flops: peak of one device in operations per second; ``None`` for the value that Lightning knows.

    Attributes:
        tokens_seen: tokens so far, on rank 0.

    Raises:
        ConfigurationError: ``window`` or ``every_n_batches`` is below 1.
    """

    def __init__(self, window: int = 20, every_n_batches: int = 10, peak_flops: float | None = None) -> None:
        if window < 1 or every_n_batches < 1:
            raise ConfigurationError(
                f"PipelineMonitor needs numbers of at least 1: window={window!r}, every_n_batches={every_n_batches!r}"
            )
        self.every_n_batches, self.peak_flops = every_n_batches, peak_flops
        self.tokens_seen = 0.0
        self._peak = peak_flops
        self._reader: Reader | None = None
        self._clock: Clock = HOST
        self._since: Moment | None = None  # None while the clock is stopped
        self._ending: deque[tuple[Moment, Moment, float]] = deque()  # batches that a device may not have finished
        self._recent: deque[_Batch] = deque(maxlen=window)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the number of tokens of the interrupted run."""
        self.tokens_seen = state_dict["tokens_seen"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget an earlier run; on rank 0 of a pipeline, begin to record the stage."""
        self._since = None
        self._ending.clear()
        self._recent.clear()
        if not trainer.is_global_zero:
            return
        self._peak = self.peak_flops or _known_peak(trainer)
        if isinstance(trainer.strategy, PipelineStrategy):
            engine = trainer.strategy.session.running()
            self._clock, self._reader = engine.runner.clock, follow(engine)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock if it is stopped."""
        if self._since is None:
            self._since = self._clock.now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the time since the end of the previous batch, including the loading of data, and log."""
        if not trainer.is_global_zero or self._since is None:
            return
        tokens, now = _tokens(trainer, pl_module, batch), self._clock.now()
        self.tokens_seen += tokens
        self._ending.append((self._since, now, tokens))
        self._since = now
        self._read_ended()
        if self._recent and (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0:
            for name, value in self._metrics(trainer, pl_module).items():
                if value is not None:
                    _log(pl_module, name, value)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock until training goes on."""
        self._since = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the peak memory of a pipeline's stages, except after a sanity check; a collective call on GPUs."""
        if not trainer.sanity_checking:
            _show_memory(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the peak memory of a pipeline's stages; a collective call on GPUs."""
        _show_memory(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop recording the stage."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop recording the stage."""
        self._close()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read_ended(self) -> None:
        """Read the spans of the batches that their device has finished."""
        while self._ending and (until := self._clock.when(self._ending[0][1])) is not None:
            since, _, tokens = self._ending.popleft()
            begun = self._clock.when(since)
            spans = [] if self._reader is None else self._reader.take(until)
            self._recent.append(_Batch(until if begun is None else begun, until, tokens, spans))

    def _metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float | None]:
        seconds = max(1e-9, sum(batch.until - batch.since for batch in self._recent))
        tokens = sum(batch.tokens for batch in self._recent)
        found = {
            "tokens_per_second": tokens / seconds if self.tokens_seen else None,
            "tokens_seen": self.tokens_seen or None,
            "mfu": self._mfu(trainer, pl_module, tokens, seconds),
        }
        if self._reader is not None:
            found |= {
                "gradient_norm": trainer.strategy.gradient_norm,  # type: ignore[attr-defined]
                "bubble": self._bubble(seconds),
                "gradient_staleness": _staleness(trainer),
            }
        return found

    def _mfu(self, trainer: L.Trainer, pl_module: L.LightningModule, tokens: float, seconds: float) -> float | None:
        per_batch, per_token = (getattr(pl_module, name, None) for name in ("flops_per_batch", "flops_per_token"))
        done = float(per_token or 0.0) * tokens
        if per_batch is not None:
            done = float(per_batch) * len(self._recent) * replica_of(trainer)[0]
        return done / seconds / (self._peak * trainer.world_size) if self._peak and done else None

    def _bubble(self, seconds: float) -> float:
        start, end = self._recent[0].since, self._recent[-1].until
        busy = utilisation((span for batch in self._recent for span in batch.spans), start, end)
        return 1 - busy * (end - start) / seconds  # validations between the batches do not count


def _log(pl_module: L.LightningModule, name: str, value: float) -> None:
    """Log a value of this process only."""
    # Lightning would copy a float to the device, and the progress bar would wait for the device to read it back.
    tensor = torch.tensor(value, device="cpu")
    pl_module.log(name, tensor, prog_bar=name in _IN_BAR, rank_zero_only=True, on_step=True, on_epoch=False)


def _tokens(trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> float:
    """Return the number of tokens of a batch over all replicas; 0 if the module does not count them."""
    weigh = getattr(pl_module, "microbatch_weight", None)
    if not callable(weigh):
        return 0.0
    weighed = getattr(trainer.strategy, "batch_weight", None)
    # `batch` may be on a GPU, for which the host would wait; a pipeline has already counted its tokens on the host.
    return float(weigh(batch) if weighed is None else weighed) * replica_of(trainer)[0]


def _staleness(trainer: L.Trainer) -> float | None:
    """Return the delay of the newest gradient in updates, the mean over all trained parameters."""
    session = trainer.strategy.session  # type: ignore[attr-defined]
    engine, microbatches = session.running(), session.resolved.microbatches * trainer.accumulate_grad_batches
    newest, trained = max(0, engine.mini_batch - 1), engine.stages[0].stage.whole.num_trained
    rules = [schedule.stage_rule for schedule in engine.schedules()]
    ages = (0.0 if rule.all_at_newest(newest) else rule.staleness(microbatches) for rule in rules)
    return sum(age * count for age, count in zip(ages, trained)) / sum(trained) if any(trained) else None


def _known_peak(trainer: L.Trainer) -> float | None:
    """Return this device's peak in operations per second at the run's precision, if Lightning knows it."""
    dtype = _DTYPES.get(str(trainer.precision).partition("-")[0])
    return None if dtype is None else get_available_flops(trainer.strategy.root_device, dtype)


def _show_memory(trainer: L.Trainer) -> None:
    strategy = trainer.strategy
    if isinstance(strategy, PipelineStrategy) and strategy.root_device.type == "cuda":
        peaks = peak_memory(strategy.session, strategy.root_device)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(peaks, step=trainer.global_step)


def peak_memory(session: PipelineSession, device: torch.device) -> dict[str, float]:
    """Return torch's peak memory on each stage, the largest over its replicas, in GB; a collective call."""
    assert session.mesh is not None
    with session.watch.collective():
        own = f"{session.mesh.stage} {torch.cuda.max_memory_allocated(device)}"
        received = [text.split() for text in all_gather_object(session.mesh, own)]
    peaks = [max(int(size) for stage, size in received if int(stage) == s) for s in range(session.mesh.num_stages)]
    return {f"peak_memory_stage_{stage}": peak / _GB for stage, peak in enumerate(peaks)}
