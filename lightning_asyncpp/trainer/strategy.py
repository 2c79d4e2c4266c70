"""Trainer strategies that users choose by name."""

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
    """Asynchronous pipeline parallelism without a flush: PipeDream-2BW with only a share of each gradient delayed.

    Raises:
        ConfigurationError: the run cannot be trained; raised on every rank when training starts, with all problems.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021).
    """

    delay = 1


class SyncPipelineStrategy(PipelineStrategy):
    """Synchronous pipeline parallelism on the same engine: 1F1B with a flush per mini-batch, no delay.

    Arguments as for :class:`AsyncPipelineStrategy`, but ``staleness`` and ``slack`` must be left out. Any number of
    microbatches works, and ``lookahead`` defaults to 0.
    """

    delay = 0


class DelayedGradientStrategy(PipelineStrategy):
    """Simulation of a pipeline on one device, to find out whether delayed gradients suit a model.

    The engine of the pipeline strategies runs all stages in this process, one after the other, on one whole model. The
    results equal those of ``async_pipeline`` with the same numbers of stages and microbatches, bit for bit.

    Args:
        stages: number of stages. With one stage, a module that declares no layers is not cut, so any module with
            automatic optimization works.
        delay: 1 to train like ``async_pipeline``, 0 like ``sync_pipeline``.
        microbatches, slack, lookahead, partition, weight_dtype, nonfinite_gradients: as for ``async_pipeline``.
        staleness: as for ``async_pipeline``; with one stage always ``"uniform"``: with ``delay=1`` every
            gradient is one update old.
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
        """Whether the module is not cut: there is one stage, and the module declares no layers."""
        network = network_in(self._module)
        return self.num_stages == 1 and (network is None or not has_layers(network))
