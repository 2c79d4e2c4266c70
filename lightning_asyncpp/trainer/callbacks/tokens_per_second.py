"""Throughput in the progress bar and the logger."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import lightning as L
import torch


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
