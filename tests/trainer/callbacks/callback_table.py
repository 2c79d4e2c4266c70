"""Table of how each of Lightning's callbacks works under a pipeline, the source of ``docs/reference/callbacks.md``.

Run ``python -m tests.trainer.callbacks.callback_table`` to write the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import callbacks

from tests.helpers.trainer import ListLogger  # noqa: F401  (a worker that unpickles an entry has the loggers)

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "callbacks.md"
WORKS, NOTE, REFUSED, BASE = "works", "works, with a note", "refused", "base class"


class Entry(NamedTuple):
    """Row of the table: a callback of Lightning, its verdict, a note for users, and arguments of its constructor."""

    name: str
    verdict: str
    note: str = ""
    arguments: dict[str, Any] = {}


class Finetuning(callbacks.BaseFinetuning):
    """Minimal finetuning callback."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze nothing."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze nothing."""


class Writer(callbacks.BasePredictionWriter):
    """Callback that keeps the number of predictions in each batch."""

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written = [None if batch is None else len(batch) for batch in predictions]


def samples_of(batch: dict[str, torch.Tensor]) -> int:
    """Return the number of samples in a batch, for ThroughputMonitor."""
    return len(batch["x"])


AVERAGED = (
    "Each stage averages its own layers; validations and checkpoints have the averages of all. Not with `weight_dtype`."
)
STAGE_TABLE = "A table of all stages takes its place."
NOT_UNDER_STAGES = "each rank holds one stage, and two versions of its weights"

TABLE = [
    Entry("BackboneFinetuning", REFUSED, "It freezes and unfreezes parameters while two versions of them are alive."),
    Entry("BaseFinetuning", REFUSED, "It freezes and unfreezes parameters while two versions of them are alive."),
    Entry(
        "BasePredictionWriter", NOTE, "Predictions are on the last stage, `None` elsewhere.",
        {"write_interval": "epoch"},
    ),
    Entry("BatchSizeFinder", REFUSED, "It needs an out-of-memory error on all ranks at once."),
    Entry("Callback", BASE, "Yours: hooks run on every rank; metrics are the same on all, weights the stage's own."
        " Between two batches weights may be one update old: `after_own_update(callback)`, see above."
        " Checkpoints have every stage's state."),
    Entry("Checkpoint", BASE, "A checkpoint callback of your own must call `trainer.save_checkpoint` on every rank."),
    Entry("DeviceStatsMonitor", NOTE, "Logs the device of rank 0, the last stage.", {"cpu_stats": False}),
    Entry(
        "EarlyStopping", WORKS, "All ranks decide alike; on a training metric by epoch.",
        {"monitor": "train_loss_epoch", "patience": 0, "min_delta": 10.0},
    ),
    Entry("EMAWeightAveraging", NOTE, AVERAGED),
    Entry(
        "GradientAccumulationScheduler", NOTE, "Accumulated batches share one update: N x m microbatches.",
        {"scheduling": {0: 2}},
    ),
    Entry("LambdaCallback", WORKS),
    Entry("LearningRateFinder", REFUSED, "It runs and rolls back training by itself."),
    Entry("LearningRateMonitor", WORKS, "Logs the rate that the batch's update takes.", {"logging_interval": "step"}),
    Entry(
        "ModelCheckpoint", WORKS, "Saving drains the pipeline and gathers all stages on rank 0.",
        {"monitor": "train_loss_epoch", "every_n_train_steps": 2, "save_last": True},
    ),
    Entry(
        "ModelPruning", REFUSED, "It rewrites parameters while two versions of them are alive.",
        {"pruning_fn": "l1_unstructured", "amount": 0.5},
    ),
    Entry("ModelSummary", NOTE, STAGE_TABLE),
    Entry(
        "OnExceptionCheckpoint", NOTE,
        "After a failure on one rank nothing can be gathered, and nothing is saved; after SIGTERM it saves.",
        {"dirpath": "."},
    ),
    Entry("ProgressBar", BASE, "Shown by rank 0, the last stage; logged values appear one batch later."),
    Entry("RichModelSummary", NOTE, STAGE_TABLE),
    Entry("RichProgressBar", WORKS),
    Entry("SpikeDetection", REFUSED, "It compares every rank's loss in every batch, but only the last stage has it."),
    Entry(
        "StochasticWeightAveraging", REFUSED, f"It averages a whole model, but {NOT_UNDER_STAGES}.", {"swa_lrs": 0.1}
    ),
    Entry(
        "ThroughputMonitor", NOTE, "It counts by world size: with P stages its global figures are P times too high. Use"
        " `PipelineMonitor`.", {"batch_size_fn": samples_of, "window_size": 2},
    ),
    Entry(
        "Timer", NOTE,
        "A blocking broadcast in every batch costs part of what asynchrony gains: use `interval=\"epoch\"`.",
        {"duration": {"minutes": 5}},
    ),
    Entry("TQDMProgressBar", WORKS),
    Entry("WeightAveraging", NOTE, AVERAGED),
]  # fmt: skip


def make(name: str) -> callbacks.Callback:
    """Return a callback of the class ``name``, made with the table's arguments."""
    entry = next(entry for entry in TABLE if entry.name == name)
    concrete = {"BaseFinetuning": Finetuning, "BasePredictionWriter": Writer}
    return concrete.get(name, getattr(callbacks, name))(**entry.arguments)


OF_YOURS = (
    "A callback of yours that reads or changes weights in `on_train_batch_end`, such as a hand-written EMA, needs",
    "`after_own_update` ([the contract](../concepts/contract.md#between-two-batches)), or is Lightning's",
    "`EMAWeightAveraging`. In `on_train_epoch_end` and in validations all updates have been applied.",
)


def page() -> str:
    """Return the text of ``docs/reference/callbacks.md``."""
    lines = [
        "# Callbacks of Lightning under a pipeline",
        "",
        "Made from `tests/trainer/callbacks/callback_table.py`, where every row is tested; do not edit.",
        "",
        *OF_YOURS,
        "",
        "| Callback | Verdict | Note |",
        "| --- | --- | --- |",
        *(f"| `{entry.name}` | {entry.verdict} | {entry.note} |" for entry in TABLE),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
