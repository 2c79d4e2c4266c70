"""The arguments of the Trainer's strategies."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision

from lightning_asyncpp.strategy_parts.arguments import DDPArguments, PipelineArguments


@dataclass(frozen=True)
class TrainersDDPArguments(DDPArguments):
    """What the Trainer's DDP strategy takes."""

    accelerator: Accelerator | None = None
    precision_plugin: Precision | None = None


@dataclass(frozen=True)
class TrainerArguments(TrainersDDPArguments, PipelineArguments):
    """What the pipeline strategies take under a Trainer.

    Args:
        start_method: how Lightning starts the processes; ``"popen"`` runs the script again, ``"fork"`` works in
            notebooks, ``"spawn"`` where everything can be pickled: with these two the process that starts the others
            is no rank, and its module is the whole trained one after ``fit``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in every strategy; the
            Trainer sets them.
    """
