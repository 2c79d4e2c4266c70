"""The arguments of Fabric's strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import Precision
from torch import nn

from lightning_asyncpp.core.batches.user_hooks import BY_NAME
from lightning_asyncpp.strategy_parts.arguments import DDPArguments, DelayArguments, PipelineArguments, part_of

SplitBatch = Callable[[Any, int], list[Any]]
MicroBatchWeight = Callable[[Any], float]


@dataclass(frozen=True)
class FabricsDDPArguments(DDPArguments):
    """What Fabric's DDP strategy takes."""

    accelerator: Accelerator | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class ModelArguments:
    """What a LightningModule says of its batches itself, and a model under Fabric may leave to the strategy."""

    split_batch: SplitBatch | None = None
    micro_batch_weight: MicroBatchWeight | None = None
    loss_reduction: Literal["mean", "sum"] | None = None
    example_input_array: Any | None = None

    @property
    def hooks(self) -> dict[str, Any]:
        """Those of :class:`UserHooks`, by name; ``None`` leaves one to the model."""
        return {name: getattr(self, name) for name in BY_NAME}

    def example_for(self, model: nn.Module) -> Any:
        """The example input that was given, or else the model's own."""
        given = self.example_input_array
        return getattr(model, "example_input_array", None) if given is None else given


@dataclass(frozen=True)
class FabricArguments(FabricsDDPArguments, ModelArguments, PipelineArguments):
    """What the pipeline strategies take under Fabric.

    Args:
        partition: which layers each stage gets. ``"auto"`` makes the largest cost of a stage as small as it can be: by
            the model's ``pipeline_costs()``, or else by the times of its layers on ``example_input_array``, or else
            by numbers of parameters; ``"uniform"`` gives all the same number of layers; a list says how many layers
            each stage gets, first stage first.
        start_method: how Fabric starts the processes; ``"popen"`` runs the script again, ``"fork"`` works in notebooks,
            ``"spawn"`` where everything can be pickled: with these two ``fabric.launch(function)`` brings back what the
            function returns on rank 0, and nothing else. A model from outside of it stays as it was: ``fabric.save`` it
            in the function, and load that.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as in every strategy; Fabric sets
            them.
    """

    metric_slots: int = field(default=64, init=False)  # no argument: loops log what they like


@dataclass(frozen=True)
class FabricDelayArguments(ModelArguments, DelayArguments):
    """What ``delayed_gradient`` takes under Fabric: as under a Trainer, and what a LightningModule would say.

    Args:
        split_batch, micro_batch_weight, loss_reduction, example_input_array: as for the pipeline strategies.
    """

    def of_pipeline(self) -> dict[str, Any]:
        """Name -> value of the arguments that a pipeline strategy takes."""
        return part_of(ModelArguments, self) | super().of_pipeline()
