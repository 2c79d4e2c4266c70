"""What the Trainer's and Fabric's ``delayed_gradient`` strategies share: one process or DDP, and the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_asyncpp.adapt import problems_of_adapting
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.elsewhere import OtherStage
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition, problem_of_cutting
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.emulator.delay_emulator import DelayEmulator
from lightning_asyncpp.core.emulator.gradient_delay import DelaySettings
from lightning_asyncpp.core.emulator.micro_batch_gradient import MicroBatchGradient
from lightning_asyncpp.core.randomness import seed_of_run
from lightning_asyncpp.core.ranks.agreement import broadcast_tensor
from lightning_asyncpp.errors import ConfigurationError

_NOT_CUT = (
    "no pipeline with stages={} could cut this model, so its parameters, in their order, are spread evenly over the"
    " stages by which delays go: {}"
)


class DelayedStrategyMixin:
    """Comes before one of Lightning's DDP strategies, which is left out of it where there is one process only.

    Attributes:
        settings: the user's choices; checked.
        emulator: keeps the older weights; ``None`` before there is an optimizer.
    """

    applies_statistics = True  # a module need not look after its StatisticsLayers itself
    settings: DelaySettings
    emulator: DelayEmulator | None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's question for names: they are registered by importing the package."""

    @property
    def _alone(self) -> bool:
        return bool(self.num_nodes * self.num_processes == 1)  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        # One process needs no launcher, and so works in notebooks too.
        if not self._alone:
            super()._configure_launcher()  # type: ignore[misc]

    def _share_weights(self, module: nn.Module) -> None:
        """Take rank 0's weights, as DDP does; for gradients that are reduced once, at the update.

        Raises:
            ConfigurationError: a pipeline has left this process a part of the module alone.
        """
        if any(isinstance(layer, OtherStage) for layer in module.modules()):
            raise ConfigurationError(
                "the module was cut into stages by a pipeline before, and each process has a part of it: build it anew;"
                " a checkpoint, which holds all stages, brings its weights back"
            )
        for tensor in module.state_dict().values():
            broadcast_tensor(tensor, 0)

    def _cut_as_a_pipeline(self, network: nn.Module | None, example: Any, name: str) -> None:
        """Have the model say where it can be cut, as pipelines do, where delays go by stages; a warning if it cannot.

        Args:
            network: what a pipeline would cut, if anything.
            example: of its arguments, if there is one.
            name: how the user calls it.
        """
        settings = self.settings
        if network is None or settings.stages is None or not settings.cuts_as_a_pipeline:
            return
        if problems := problems_of_adapting(network, example, name):
            rank_zero_warn(_NOT_CUT.format(settings.stages, problems[0]))

    def _micro_batch_gradient(
        self, module: nn.Module, network: nn.Module | None, hooks: UserHooks
    ) -> MicroBatchGradient | None:
        """Sums gradients as a pipeline does; ``None`` with whole batches.

        Args:
            module: whose parameters are trained.
            network: what a pipeline would cut, if anything.
            hooks: the user's functions for micro-batches.
        """
        if self.settings.micro_batches is None:
            return None
        seed = self.broadcast(seed_of_run())  # type: ignore[attr-defined]
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        rank, ranks = self.global_rank, self.world_size  # type: ignore[attr-defined]
        parameters = dict(module.named_parameters())
        return MicroBatchGradient(parameters, network, hooks, self.settings.micro_batches, seed, device, rank, ranks)

    def _partition(self, network: nn.Module | None, example: Example | None) -> Partition | None:
        """How a pipeline cuts the model, where delays go by that; None where they do not, or it could not cut it.

        Rank 0 chooses.

        Raises:
            ConfigurationError: the partition that was asked for does not fit the model.
        """
        settings = self.settings
        if network is None or settings.stages is None or not settings.cuts_as_a_pipeline:
            return None
        if settings.partition == "auto" and (problem := problem_of_cutting(network, settings.stages)):
            if has_layers(network):  # otherwise it was told already
                rank_zero_warn(_NOT_CUT.format(settings.stages, problem))
            return None
        partition: Partition | None = None
        failure: Exception | None = None
        if self.global_rank == 0:  # type: ignore[attr-defined]
            try:
                partition = choose_partition(network, 0, settings.stages, settings.partition, example)
            except Exception as error:
                failure = error
        partition, problem = self.broadcast((partition, str(failure)))  # type: ignore[attr-defined]
        if partition is None:
            raise failure or ConfigurationError(problem)
        rank_zero_info(f"Emulated pipeline: {settings.stages} stages, {partition.describe()}")
        if partition.remark:
            rank_zero_warn(partition.remark)
        return partition

    def _checked(self, closure: Callable[[], Any], precision: Any) -> Callable[[], Any]:
        """The closure, for optimizers that may evaluate it several times; it raises if the gradient is not finite."""

        def checked() -> Any:
            result = closure()
            if not _scales(precision):
                assert self.emulator is not None
                self.emulator.check_finite()
            return result

        return checked

    def _update(self, step: Callable[[], Any], precision: Any) -> None:
        """Apply the complete gradient, and say so where it is left out."""
        assert self.emulator is not None
        if not self.emulator.update(step, check_finite=not _scales(precision)):
            rank_zero_warn(
                f"mini-batch {self.emulator.mini_batch - 1}: its gradient holds NaN or Inf; the update was skipped"
            )


def _scales(precision: Any) -> bool:
    """Whether the precision plugin scales the loss: it then looks for infinities itself, and leaves such steps out."""
    return getattr(precision, "scaler", None) is not None
