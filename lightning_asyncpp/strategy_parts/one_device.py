"""Base of the strategies that run all stages of a pipeline on one device."""

from __future__ import annotations

from typing import Literal

from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.settings import is_whole
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.mixin import PipelineStrategyMixin


class OneDeviceMixin(PipelineStrategyMixin):
    """Mixin, before a strategy, whose stages are all in this process.

    Args:
        stages: number of stages. With one stage, a model that declares no layers is not cut, so any one works.
        delay: 1 to train like ``async_pipeline``, 0 like ``sync_pipeline``.
        microbatches, slack, synchronous_start, lookahead, partition, weight_dtype, nonfinite_gradients: as for
            ``async_pipeline``.
        staleness: as for ``async_pipeline``; with one stage always ``"uniform"``: gradients are ``delay`` updates old.
    """

    def __init__(
        self,
        stages: int = 1,
        delay: int = 1,
        microbatches: int | None = None,
        staleness: Staleness | None = None,
        slack: Slack = 0,
        synchronous_start: int = 0,
        lookahead: int | None = None,
        partition: Literal["auto", "uniform"] | list[int] = "auto",
        weight_dtype: Literal["bf16"] | None = None,
        nonfinite_gradients: Literal["stop", "skip"] = "stop",
    ) -> None:
        if not is_whole(stages) or stages < 1:
            raise ConfigurationError(f"stages={stages!r} must be a whole number of at least 1")
        self.stages_in_process, self.delay = stages, delay
        super().__init__(
            microbatches,
            "uniform" if stages == 1 else staleness,
            slack,
            synchronous_start,
            lookahead,
            partition=partition,
            weight_dtype=weight_dtype,
            nonfinite_gradients=nonfinite_gradients,
        )
