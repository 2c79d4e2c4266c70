"""How well a pipeline runs, in the progress bar and the logger: from the spans of the last batches.

They tell how much of a stage's time was work, and how old gradients are; TokensPerSecond is the throughput alone.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.trace import (
    HOST,
    WORK,
    Clock,
    Moment,
    Reader,
    Span,
    has_passed,
    hidden_share,
    seconds_by_kind,
)
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.recording import follow
from lightning_asyncpp.trainer.base import PipelineStrategy

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
_IN_BAR = ("tokens_per_second", "mfu", "bubble")
_END_SECONDS = 1.0
"""How long the end of a training waits for a device to come to what was launched."""
_GB = 1e9


class TokensPerSecond(L.Callback):
    """Logs the tokens that the whole run trains on per second, averaged over the last batches, and all it has seen.

    - ``tokens_per_second``: in the progress bar, too.
    - ``tokens_seen``: since the training began; a checkpoint has it, and a run goes on counting from there. Under a
      pipeline those of the updates that were applied, of all replicas.

    Only global rank 0 measures and logs, and it asks no other: the other replicas are taken to be as fast. Tokens are
    what the module's ``micro_batch_weight`` counts in a batch. Time spent in validation does not count.

    Args:
        window: number of batches that are averaged.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ValueError(f"window={window!r}: must be at least 1")
        self._batches: deque[tuple[float, float]] = deque(maxlen=window)  # (seconds, tokens) of each
        self._last_end: float | None = None
        self._before = 0.0  # tokens of earlier trainings, less what the strategy had counted then
        self._strategy: Any = None

    @property
    def tokens_seen(self) -> float:
        """Tokens of the whole run that were trained on."""
        return self._before + (0.0 if self._strategy is None else self._strategy.weight_seen)

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs to know."""
        return {"tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._before, self._strategy = state_dict["tokens_seen"], None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module that cannot count tokens."""
        if not callable(getattr(pl_module, "micro_batch_weight", None)):
            raise ValueError(
                f"TokensPerSecond cannot count the tokens of a batch: {type(pl_module).__name__} has no "
                "micro_batch_weight(batch); add it, or leave the callback out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget an earlier run."""
        self._batches.clear()
        self._last_end = None
        seen, self._strategy = self.tokens_seen, trainer.strategy if hasattr(trainer.strategy, "weight_seen") else None
        self._before = seen - (0.0 if self._strategy is None else self._strategy.weight_seen)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock until training goes on."""
        self._last_end = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock if it is stopped."""
        if self._last_end is None:
            self._last_end = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time since the end of the batch before, loading included, and log."""
        if trainer.is_global_zero and self._measure(trainer, pl_module, batch):
            log_on_rank_zero(pl_module, "tokens_per_second", self.rate)
            log_on_rank_zero(pl_module, "tokens_seen", self.tokens_seen, prog_bar=False)

    @property
    def rate(self) -> float:
        """Tokens of the whole run per second, averaged over the window."""
        seconds = sum(batch_seconds for batch_seconds, _ in self._batches)
        return sum(batch_tokens for _, batch_tokens in self._batches) / max(seconds, 1e-9)

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> bool:
        """Take in the batch that just ended; false if the clock stood still."""
        if self._last_end is None:
            return False
        now = time.perf_counter()
        tokens = self._tokens(trainer, pl_module, batch) * _replicas(trainer)
        self._batches.append((now - self._last_end, tokens))
        self._last_end = now
        if self._strategy is None:
            self._before += tokens
        return True

    def _tokens(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> float:
        weighed = getattr(trainer.strategy, "batch_weight", None)
        # A pipeline has weighed it on the host; the batch here may be on a GPU, which would be waited for.
        return float(pl_module.micro_batch_weight(batch) if weighed is None else weighed)  # type: ignore[operator]


def log_on_rank_zero(pl_module: L.LightningModule, name: str, value: float, prog_bar: bool = True) -> None:
    """Log a value of this process alone, in the logger and the progress bar."""
    # Of a float Lightning makes a tensor on the device, and waits for it whenever it shows it.
    pl_module.log(
        name, torch.tensor(value, device="cpu"), prog_bar=prog_bar, rank_zero_only=True, on_step=True, on_epoch=False
    )


def _replicas(trainer: L.Trainer) -> int:
    sampler = trainer.distributed_sampler_kwargs
    return 1 if sampler is None else int(sampler["num_replicas"])


class _Batch(NamedTuple):
    """One batch: when it ran, and what the stage did. ``counts`` is False if the clock stood still before it."""

    since: float
    until: float
    counts: bool
    spans: list[Span]


class PipelineMonitor(TokensPerSecond):
    """Logs throughput and how well the pipeline is used, averaged over the last batches.

    - ``tokens_per_second``, ``tokens_seen``: of all replicas, as ``TokensPerSecond``; for modules with
      ``micro_batch_weight``.
    - ``gradient_norm``: 2-norm over all stages, before clipping, of the newest update: that of the batch before.
    - ``mfu``: share of the devices' peak that the model's own operations use (0 to 1).
    - ``bubble``: share of the time in which the last stage runs neither a forward nor a backward (0 to 1): that of a
      flush, but also updates, the loader and the trainer's own work.
    - ``update_hidden``: share of the time between a complete gradient and its update in which the last stage does not
      wait for the other ranks (0 to 1).
    - ``gradient_staleness``: updates by which gradients are too old, the mean over the micro-batches of a mini-batch
      and over the trained parameters of all stages: 0 with a flush; 1 with ``staleness="uniform"`` once the delay has
      begun.
    - ``gradient_staleness_stage_0``, ...: the same of every stage, where they differ.

    On a GPU all but the first two are known when it has come to the end of a batch: usually a batch or two later.

    Nothing is exchanged: rank 0, the last stage of the first replica, logs its own spans, and the staleness that the
    schedules of all stages say.

    ``mfu`` needs the module's ``flops_per_batch`` (floating-point operations of a forward and its backward of the whole
    model, for the batch of one replica) or ``flops_per_token``; and a device whose peak Lightning knows, or
    ``peak_flops``. ``measure_flops`` of ``lightning.fabric.utilities`` counts them on the meta device.

    After each validation and each epoch of training, on GPUs, ``peak_memory_stage_0``, ... go to the loggers: the most
    that torch has had allocated on each stage, over its replicas, in GB. Ranks exchange it then, and at no other time.
    The memory of a process on a CPU is not shown: most of it is shared with other processes, or free again.

    Throughput, ``mfu`` and ``bubble`` stand in the progress bar, too.

    Args:
        window: number of batches that are averaged.
        every_n_batches: log after every so many batches: logging costs the last stage more than measuring does.
        peak_flops: operations per second that one device can do at most; default: what Lightning knows of it.

    Raises:
        ConfigurationError: an argument makes no sense, or the strategy is none of a pipeline's.
    """

    def __init__(self, window: int = 20, every_n_batches: int = 10, peak_flops: float | None = None) -> None:
        problems = [
            f"{name}={value!r} must be at least 1"
            for name, value in (("window", window), ("every_n_batches", every_n_batches))
            if value < 1
        ]
        if peak_flops is not None and not peak_flops > 0:
            problems.append(f"peak_flops={peak_flops!r} must be above 0, in operations per second of one device")
        if problems:
            raise ConfigurationError.from_problems(problems)
        super().__init__(window)
        self.every_n_batches = every_n_batches
        self.peak_flops = peak_flops
        self._peak: float | None = None
        self._counts_tokens = False
        self._reader: Reader | None = None
        self._rules: list[StalenessRule] = []
        self._trained: Sequence[int] = ()  # numbers in trained parameters of every stage
        self._by_stage: list[float] = []
        self._recent: deque[_Batch] = deque(maxlen=window)
        self._clock: Clock = HOST
        self._since: Moment = 0.0
        self._ending: deque[tuple[Moment, Moment, bool]] = deque()  # batches that a device may not have ended

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a strategy that has no stages."""
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise ConfigurationError(
                f"PipelineMonitor watches the stages of a pipeline, but {type(trainer.strategy).__name__} has none; use"
                " TokensPerSecond instead, or strategy='async_pipeline'"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Follow what this stage does."""
        super().on_train_start(trainer, pl_module)
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        engine = strategy.session.running()
        self._counts_tokens = callable(getattr(pl_module, "micro_batch_weight", None))
        self._peak = self.peak_flops or _known_peak(trainer, pl_module)
        self._reader = follow(engine)
        self._clock = engine.runner.clock
        self._ending.clear()
        self._recent.clear()
        self._rules = [schedule.stage_rule for schedule in engine.schedules()]
        self._trained = engine.stage.whole.num_trained

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock if it is stopped."""
        if self._last_end is None:
            self._since = self._clock.now()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take in what the stage did since the end of the batch before, and log."""
        elapsed, now = self._measure(trainer, pl_module, batch), self._clock.now()
        engine = trainer.strategy.session.running()  # type: ignore[attr-defined]
        if begun := engine.updates.begun(engine.next_forward):  # by now: in the batch's step one may begin anew
            mini_batch, first = begun[-1]
            self._by_stage = [mean_staleness(rule, mini_batch, engine.next_forward - first) for rule in self._rules]
        self._ending.append((self._since, now, elapsed))
        self._since = now
        self._read_ended()
        if trainer.is_global_zero and elapsed and (batch_idx + 1) % self.every_n_batches == 0:
            for name, value in self._metrics(trainer, pl_module).items():
                if value is not None:
                    log_on_rank_zero(pl_module, name, value, prog_bar=name in _IN_BAR)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the peak memory of all stages; a collective call on GPUs."""
        if not trainer.sanity_checking:
            self._show_memory(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the peak memory of all stages; a collective call on GPUs."""
        self._show_memory(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take in what is left, and let go of the stage."""
        if self._ending:
            has_passed(self._clock, self._ending[-1][1], _END_SECONDS)
            self._read_ended()
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let go of the stage."""
        self._close()

    def _read_ended(self) -> None:
        """Take in the batches that have ended where they are computed."""
        assert self._reader is not None
        while self._ending and (until := self._clock.when(self._ending[0][1])) is not None:
            since, _, counts = self._ending.popleft()
            self._recent.append(_Batch(self._clock.when(since) or until, until, counts, self._reader.take(until)))

    @property
    def bubble(self) -> float | None:
        """Share of the time in which this stage ran neither a forward nor a backward."""
        elapsed = sum(batch.until - batch.since for batch in self._recent if batch.counts)
        if elapsed <= 0:
            return None
        spans = [span for batch in self._recent if batch.counts for span in batch.spans]
        seconds = seconds_by_kind(spans, self._recent[0].since, self._recent[-1].until)
        return 1 - sum(seconds.get(kind, 0.0) for kind in WORK) / elapsed

    @property
    def staleness(self) -> float | None:
        """Updates by which the newest gradient is too old: the mean over all parameters that are trained."""
        if not self._by_stage or not any(self._trained):
            return None
        return sum(mean * count for mean, count in zip(self._by_stage, self._trained)) / sum(self._trained)

    def _show_memory(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        peaks = peak_memory(strategy.session, strategy.root_device)
        if peaks and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(peaks, step=trainer.global_step)

    def _metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float | None]:
        by_stage = self._by_stage if len({rule.held for rule in self._rules}) > 1 else []
        return {
            "tokens_per_second": self.rate if self._counts_tokens else None,
            "tokens_seen": self.tokens_seen if self._counts_tokens else None,
            "gradient_norm": trainer.strategy.gradient_norm,  # type: ignore[attr-defined]
            "mfu": self._mfu(trainer, pl_module),
            "bubble": self.bubble,
            "update_hidden": hidden_share(span for batch in self._recent for span in batch.spans),
            "gradient_staleness": self.staleness,
            **{f"gradient_staleness_stage_{stage}": mean for stage, mean in enumerate(by_stage)},
        }

    def _tokens(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> float:
        # Middle stages have no batch, and nobody asks them.
        counts = self._counts_tokens and trainer.is_global_zero
        return super()._tokens(trainer, pl_module, batch) if counts else 0.0

    def _mfu(self, trainer: L.Trainer, pl_module: L.LightningModule) -> float | None:
        per_batch, per_token = (getattr(pl_module, name, None) for name in ("flops_per_batch", "flops_per_token"))
        mesh = trainer.strategy.session.mesh  # type: ignore[attr-defined]
        seconds = sum(batch_seconds for batch_seconds, _ in self._batches)
        if self._peak is None or seconds <= 0:
            return None
        if per_batch is not None:
            done = float(per_batch) * len(self._batches) * mesh.num_replicas
        elif per_token is not None and self._counts_tokens:
            done = float(per_token) * sum(tokens for _, tokens in self._batches)
        else:
            return None
        return float(done / seconds / (self._peak * mesh.world_size))

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def mean_staleness(rule: StalenessRule, mini_batch: int, micro_batches: int) -> float:
    """Return by how many updates the gradient of so many first microbatches of a mini-batch is too old, on average."""
    versions = [rule.version(mini_batch, place) for place in range(micro_batches)]
    return mini_batch - sum(versions) / len(versions) if versions else 0.0


def _known_peak(trainer: L.Trainer, pl_module: L.LightningModule) -> float | None:
    """Operations per second of this device at the run's precision, if Lightning knows them."""
    dtype = _DTYPES.get(str(trainer.precision).partition("-")[0])
    if dtype is None or pl_module.device.type not in ("cuda", "xla"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_available_flops(pl_module.device, dtype)


def peak_memory(session: PipelineSession, device: torch.device) -> dict[str, float]:
    """The most that torch has had allocated on each stage since its process began, in GB; a collective call on GPUs.

    Args:
        session: the pipeline, connected.
        device: of this rank.

    Returns:
        ``peak_memory_stage_0`` and so on, of several replicas the largest; empty where there are no GPUs.
    """
    if device.type != "cuda":
        return {}
    assert session.mesh is not None
    with session.watch.collective():
        own = f"{session.mesh.stage} {torch.cuda.max_memory_allocated(device)}"
        said = [text.split() for text in exchange(session.mesh, own)]
    peaks = [max(int(size) for stage, size in said if int(stage) == s) for s in range(session.mesh.num_stages)]
    return {f"peak_memory_stage_{stage}": peak / _GB for stage, peak in enumerate(peaks)}
