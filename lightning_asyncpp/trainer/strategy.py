"""The Trainer strategies by name."""

from __future__ import annotations

from typing import Literal

import lightning as L
from torch.nn import Module
from typing_extensions import override

from lightning_asyncpp.core.cut.network import network_in
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.settings import is_whole
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer.base import PipelineStrategy


class AsyncPipelineStrategy(PipelineStrategy):
    """Asynchronous pipeline parallelism without a flush: PipeDream-2BW, of which only a share of a gradient is old.

    Raises:
        ConfigurationError: when training starts, on every rank, with every problem that was found.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021).
    """

    delay = 1


class SyncPipelineStrategy(PipelineStrategy):
    """Synchronous pipeline parallelism on the same engine: 1F1B with a flush per mini-batch, no delay.

    Arguments as for :class:`AsyncPipelineStrategy`; any number of microbatches works, ``lookahead`` defaults to 0.
    """

    delay = 0


class DelayedGradientStrategy(PipelineStrategy):
    """Trains on one device what an asynchronous pipeline would train: is that safe for my model?

    The engine of the pipeline strategies runs all stages in this process, on one whole model: the training is bitwise
    that of ``async_pipeline`` with as many stages and microbatches, and takes their time one after the other. With one
    stage nothing is asked of the module but automatic optimization: each of its gradients is one update old.

    Args:
        stages: number of stages. With one, any module will do: it is not cut, and its whole step runs on older weights.
        delay: 1 for what an asynchronous pipeline trains, 0 for what a synchronous one does.
        microbatches, slack, lookahead, partition, weight_dtype, nonfinite_gradients: as for ``async_pipeline``.
        staleness: as for ``async_pipeline``; with one stage ``"uniform"``, which makes every gradient one update old.
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
