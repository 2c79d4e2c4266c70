"""Fabric strategies that users choose."""

from __future__ import annotations

from torch.nn import Module
from typing_extensions import override

from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.fabric.base import PipelineStrategy
from lightning_asyncpp.strategy_parts.one_device import OneDeviceMixin


class AsyncPipelineStrategy(PipelineStrategy):
    """Asynchronous pipeline parallelism without a flush: PipeDream-2BW, by default with part of each gradient delayed.

    Raises:
        ConfigurationError: the run cannot be trained; raised on every rank, with all problems, by this class, when
            Fabric launches, or when a model or an optimizer is set up.

    Example::

        strategy = AsyncPipelineStrategy(microbatches=8)
        fabric = L.Fabric(strategy=strategy, devices=4)
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = build()
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(make_optimizer(model))
        for batch in loader:
            loss = strategy.training_step(lambda microbatch: loss_of(model, microbatch), batch)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        strategy.drain()

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

    Loop and engine are those of the pipeline strategies, with all stages in this process, on one whole model.

    Arguments as for :class:`OneDeviceMixin`.
    """

    @override
    def _is_cut(self, module: Module) -> bool:
        return self.stages_in_process != 1 or has_layers(module)
