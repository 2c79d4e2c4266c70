"""Throughput in the progress bar and the logger."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import lightning as L
import torch


class TokensPerSecond(L.Callback):
    """Logs the tokens that the whole run trains on per second, averaged over the last batches.

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
        self._batches.append((now - self._last_end, self._tokens(trainer, pl_module, batch) * _replicas(trainer)))
        self._last_end = now
        return True

    def _tokens(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> float:
        weighed = getattr(trainer.strategy, "batch_weight", None)
        # A pipeline has weighed it on the host; the batch here may be on a GPU, which would be waited for.
        return float(pl_module.micro_batch_weight(batch) if weighed is None else weighed)  # type: ignore[operator]


def log_on_rank_zero(pl_module: L.LightningModule, name: str, value: float) -> None:
    """Log a value of this process alone, in the progress bar and the logger."""
    # Of a float Lightning makes a tensor on the device, and waits for it whenever it shows it.
    pl_module.log(
        name, torch.tensor(value, device="cpu"), prog_bar=True, rank_zero_only=True, on_step=True, on_epoch=False
    )


def _replicas(trainer: L.Trainer) -> int:
    sampler = trainer.distributed_sampler_kwargs
    return 1 if sampler is None else int(sampler["num_replicas"])
