"""The Fabric strategies by name."""

from __future__ import annotations

from lightning_asyncpp.fabric.base import PipelineStrategy


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
