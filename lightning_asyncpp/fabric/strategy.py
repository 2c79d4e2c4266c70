"""Fabric strategies that users choose."""

from __future__ import annotations

from typing import Literal

from torch.nn import Module
from typing_extensions import override

from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.settings import is_whole
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric.base import PipelineStrategy


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

    Arguments as for :class:`AsyncPipelineStrategy`, without ``staleness`` and ``slack``. Any number of microbatches
    works, and ``lookahead`` defaults to 0.
    """

    delay = 0


class DelayedGradientStrategy(PipelineStrategy):
    """Simulation of a pipeline on one device, to find out whether delayed gradients suit a model.

    The training loop is that of the pipeline strategies. Their engine runs all stages in this process, one after the
    other, on one whole model.

    Args:
        stages: number of stages. With one stage the model need not have layers, so any model works.
        delay: 1 to train like ``async_pipeline``, 0 like ``sync_pipeline``.
        microbatches, slack, lookahead, partition, weight_dtype, nonfinite_gradients: as for ``async_pipeline``.
        staleness: as for ``async_pipeline``; with one stage always ``"uniform"``: gradients are ``delay`` updates old.
    """

    def __init__(
        self,
        stages: int = 1,
        delay: int = 1,
        microbatches: int | None = None,
        staleness: Staleness | None = None,
        slack: Slack = 0,
        lookahead: int | None = None,
        partition: Literal["auto", "uniform"] | list[int] = "auto",
        weight_dtype: Literal["bf16"] | None = None,
        nonfinite_gradients: Literal["stop", "skip"] = "stop",
    ) -> None:
        if not is_whole(stages) or stages < 1:
            raise ConfigurationError(f"stages={stages!r} must be a whole number of at least 1")
        self.num_stages, self.delay = stages, delay
        super().__init__(
            microbatches,
            "uniform" if stages == 1 else staleness,
            slack,
            lookahead,
            partition=partition,
            weight_dtype=weight_dtype,
            nonfinite_gradients=nonfinite_gradients,
        )

    @override
    def _is_cut(self, module: Module) -> bool:
        return self.num_stages != 1 or has_layers(module)
