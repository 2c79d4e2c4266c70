"""What the update of a mini-batch is made of: quantities that all ranks agree on, and input of the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

HyperParameters = list[dict[str, Any]]
"""Options of every group of an optimizer, without parameters."""


@dataclass
class StopFlags:
    """Requests to stop, of one rank or of all ranks; control messages carry them.

    Attributes:
        interrupted: whether the run was asked to end, by a signal or ``request_stop``.
        finished: whether training should stop early.
    """

    interrupted: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Totals:
    """Sum of all ranks' control messages of a mini-batch, so the same on all ranks.

    Attributes:
        weight: sum of the microbatches' weights w_k in the mean loss, over the mini-batch and the replicas.
        norm: 2-norm of the mean gradient over all stages, from fp64 sums, rounded to fp32.
        finite: whether all elements of the gradient are finite.
        interrupted: number of ranks that were asked to end, by a signal or ``request_stop``.
        finished: number of ranks that want training to stop early.
        statistics: statistics of all layers, summed over all stages and replicas, (total number of statistics,) fp64.
    """

    weight: float
    norm: float
    finite: bool
    interrupted: int
    finished: int
    statistics: Tensor


@dataclass(frozen=True)
class StepInput:
    """What the optimizer's step for a mini-batch gets, apart from the gradients, which the parameters have.

    Attributes:
        mini_batch: index t of the gradient's mini-batch; the step turns W_t (weights before update t) into W_{t+1}.
        hyper_parameters: hyper-parameters of the optimizer's groups for mini-batch t.
        note: value that the strategy gave for mini-batch t.
        weight: sum of the microbatches' weights w_k over the mini-batch and the replicas, which divides the gradient.
        statistics: statistics of all layers, summed over replicas; in a step ahead of the agreement, zero except for
            this stage's layers.
        clip_groups: parameters, and the norm that their gradients are clipped by.
        weights_before: parameter -> its weights W_t before the update, which the older version keeps; None with room
            for only one version, or with masters (fp32 weights that the optimizer updates).
        staleness: mean age phi of this stage's gradient, in updates.
    """

    mini_batch: int
    hyper_parameters: HyperParameters
    note: Any
    weight: float
    statistics: Tensor
    clip_groups: Sequence[tuple[Iterable[nn.Parameter], float | Tensor]]
    weights_before: dict[nn.Parameter, Tensor] | None
    staleness: float


@dataclass(frozen=True)
class Update:
    """Update that a stage has applied, or skipped for its gradient's sake, and that all ranks have agreed on.

    Attributes:
        mini_batch: index t of the gradient's mini-batch.
        totals: what all ranks agree on.
    """

    mini_batch: int
    totals: Totals
