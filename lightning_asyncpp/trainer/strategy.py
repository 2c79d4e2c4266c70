"""The Trainer strategies by name."""

from __future__ import annotations

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
