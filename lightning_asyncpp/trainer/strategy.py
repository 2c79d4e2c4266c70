"""Trainer strategies that users choose by name."""

from __future__ import annotations

import lightning as L
from torch.nn import Module
from typing_extensions import override

from lightning_asyncpp.core.cut.network import network_in
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.strategy_parts.one_device import OneDeviceMixin
from lightning_asyncpp.trainer.base import PipelineStrategy


class AsyncPipelineStrategy(PipelineStrategy):
    """Asynchronous pipeline parallelism without a flush; by default only a share of each gradient is delayed.

    Raises:
        ConfigurationError: the run cannot be trained; raised on every rank when training starts, with all problems.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021).
    """

    delay = 1


class SyncPipelineStrategy(PipelineStrategy):
    """Synchronous pipeline parallelism on the same engine: 1F1B with a flush per mini-batch, no delay.

    Arguments as for :class:`AsyncPipelineStrategy`, without ``staleness``, ``slack`` and ``synchronous_start``. Any
    number of microbatches works, and ``lookahead`` defaults to 0.
    """

    delay = 0


class DelayedGradientStrategy(OneDeviceMixin, PipelineStrategy):
    """Simulation of a pipeline on one device, to find out whether delayed gradients suit a model.

    The engine of the pipeline strategies runs all stages in this process, one after the other, on one whole model. The
    results equal those of ``async_pipeline`` with the same numbers of stages and microbatches, bit for bit.

    Arguments as for :class:`OneDeviceMixin`.
    """

    @override
    def _structure_problems(self, trainer: L.Trainer) -> list[str]:
        return [] if self._runs_whole_steps else super()._structure_problems(trainer)

    @override
    def _network(self) -> Module:
        return self._module if self._runs_whole_steps else super()._network()

    @property
    def _runs_whole_steps(self) -> bool:
        """Whether the module is not cut: there is one stage, and the module declares no layers."""
        network = network_in(self._module)
        return self.stages_in_process == 1 and (network is None or not has_layers(network))
