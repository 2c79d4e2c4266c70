"""The Fabric strategies by name."""

from __future__ import annotations

from torch.nn import Module
from typing_extensions import override

from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.fabric.arguments import FabricDelayArguments
from lightning_asyncpp.fabric.base import PipelineStrategy
from lightning_asyncpp.strategy_parts.arguments import takes
from lightning_asyncpp.strategy_parts.mixin import OneProcessMixin


class AsyncPipelineStrategy(PipelineStrategy):
    """Asynchronous pipeline parallelism: no flush, gradients as fresh as PipeDream-2BW can have them.

    Arguments: :class:`~lightning_asyncpp.fabric.arguments.FabricArguments`.

    Raises:
        ConfigurationError: when Fabric launches or a model is set up, on every rank, with every problem found.

    Example::

        strategy = AsyncPipelineStrategy(micro_batches=8)
        fabric = L.Fabric(strategy=strategy, devices=4)
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = build()
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(make_optimizer(model))
        for batch in loader:
            loss = strategy.training_step(lambda micro_batch: loss_of(model, micro_batch), batch)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        strategy.flush()

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

    The loop is that of the pipeline strategies, and so is the engine: it runs all stages in this process, on one whole
    model. With one stage any model will do: it is not cut, and each gradient is one update old.

    Arguments: :class:`~lightning_asyncpp.fabric.arguments.FabricDelayArguments`.
    """

    @takes(FabricDelayArguments)
    def __init__(self, arguments: FabricDelayArguments) -> None:
        self.num_stages, self.delay = arguments.stages, arguments.delay
        super().__init__(**arguments.of_pipeline())

    @override
    def _is_cut(self, module: Module) -> bool:
        return self.num_stages > 1 or has_layers(module)
