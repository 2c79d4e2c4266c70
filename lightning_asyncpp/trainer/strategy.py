"""The Trainer strategies by name."""

from __future__ import annotations

import lightning as L
from torch.nn import Module
from typing_extensions import override

from lightning_asyncpp.core.cut.network import network_in
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.strategy_parts.arguments import DelayArguments, takes
from lightning_asyncpp.strategy_parts.mixin import OneProcessMixin
from lightning_asyncpp.trainer.base import PipelineStrategy


class AsyncPipelineStrategy(PipelineStrategy):
    """Asynchronous pipeline parallelism: no flush, gradients as fresh as PipeDream-2BW can have them.

    Arguments: :class:`~lightning_asyncpp.trainer.arguments.TrainerArguments`.

    Raises:
        ConfigurationError: when training starts, on every rank, with every problem that was found.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021).
    """

    delay = 1


class SyncPipelineStrategy(PipelineStrategy):
    """Synchronous pipeline parallelism on the same engine: 1F1B with a flush per mini-batch, no delay.

    Arguments as for :class:`AsyncPipelineStrategy`; any number of micro-batches works, ``lookahead`` defaults to 0.
    """

    delay = 0


class DelayedGradientStrategy(OneProcessMixin, PipelineStrategy):
    """Trains on one device what an asynchronous pipeline would train: is that safe for my model?

    The engine of the pipeline strategies runs all stages in this process, on one whole model: the training is bitwise
    that of ``async_pipeline`` with as many stages and micro-batches, and takes their time one after the other. With one
    stage nothing is asked of the module but automatic optimization: each of its gradients is one update old.

    Arguments: :class:`~lightning_asyncpp.strategy_parts.arguments.DelayArguments`.
    """

    @takes(DelayArguments)
    def __init__(self, arguments: DelayArguments) -> None:
        self.num_stages, self.delay = arguments.stages, arguments.delay
        super().__init__(**arguments.of_pipeline())

    @override
    def _structure_problems(self, trainer: L.Trainer) -> list[str]:
        return [] if self._runs_whole_steps else super()._structure_problems(trainer)

    @override
    def _network(self) -> Module:
        return self._module if self._runs_whole_steps else super()._network()

    @property
    def _runs_whole_steps(self) -> bool:
        """Whether the module is taken as it is: nobody cuts it, and it does not say where one could."""
        network = network_in(self._module)
        return self.num_stages == 1 and (network is None or not has_layers(network))
