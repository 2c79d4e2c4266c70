"""What a training step in micro-batches logs, and its layers count, where no pipeline is: logged once per batch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule

from lightning_asyncpp.trainer.logging.log_recorder import Entry, Logged, LogRecorder, combined


class MicroBatchLog:
    """Records what micro-batches log and logs the batch's values: weighted means, or as ``reduce_fx`` says.

    Args:
        module: whose ``log`` it is.
        replicas: number of data-parallel processes; with several, values are reduced over them.
    """

    def __init__(self, module: LightningModule, replicas: int) -> None:
        self._module, self._replicas = module, replicas
        self._recorder = LogRecorder(on_step=True, on_epoch=False)
        if replicas > 1:  # what is logged here is the same on all ranks already
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch level.*")

    @contextmanager
    def recording(self, weight: float) -> Iterator[None]:
        """Record what is logged meanwhile as that of a micro-batch of weight ``weight``."""
        self._recorder.weight = weight
        with _replaced(self._module, self._recorder.log):
            yield

    def log_batch(self) -> None:
        """Log what was recorded since the last call; call it where the training step may log. Collective."""
        recorder = self._recorder
        recorder.settle()
        for entry, value, weight in recorder.logged() if self._replicas == 1 else self._logged_by_any():
            self._module.log(
                entry.name, value, prog_bar=entry.prog_bar, logger=entry.logger, on_step=entry.on_step,
                on_epoch=entry.on_epoch, reduce_fx=entry.reduction,
                batch_size=weight,  # type: ignore[arg-type]  # a weight need not be whole
            )  # fmt: skip
        for name, metric in recorder.metrics.items():
            entry = recorder.metric_entries[name]
            if entry.on_epoch:
                epoch = f"{name}_epoch" if entry.on_step else name
                self._module.log(
                    epoch, metric, prog_bar=entry.prog_bar, logger=entry.logger, on_step=False, on_epoch=True
                )
            if entry.on_epoch and entry.on_step:  # callbacks find it under its plain name, too
                self._module.log(name, metric, logger=False, on_step=False, on_epoch=True)
        recorder.clear()
        recorder.metrics.clear()
        recorder.metric_entries.clear()

    def _logged_by_any(self) -> list[Logged]:
        """Values of all replicas: one of them may have no targets, and log nothing, while others do."""
        recorder, modules = self._recorder, dict(self._module.named_modules())
        own = [(asdict(entry), value, weight) for entry, value, weight in recorder.logged()]
        texts: list[Any] = [None] * self._replicas
        dist.all_gather_object(texts, json.dumps([own, recorder.objects(modules)]))
        said = [json.loads(text) for text in texts]
        recorder.agree_on_objects([objects for _, objects in said], modules)
        return combined(Logged(Entry(**fields), value, weight) for rows, _ in said for fields, value, weight in rows)


class StatisticsLog(Callback):
    """Logs metrics at the end of a training batch; in ``optimizer_step``, where they are made, Lightning allows none.

    Attributes:
        metrics: name -> value, to be logged once.
    """

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}

    def install(self, trainer: L.Trainer) -> None:
        """Stand among the trainer's callbacks, once."""
        others = [c for c in trainer.callbacks if not isinstance(c, StatisticsLog)]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the update of this batch brought."""
        if self.metrics:
            pl_module.log_dict(dict(self.metrics))
            self.metrics = {}


@contextmanager
def _replaced(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    own = module.__dict__.get("log")
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        if own is not None:
            module.log = own  # type: ignore[method-assign]
