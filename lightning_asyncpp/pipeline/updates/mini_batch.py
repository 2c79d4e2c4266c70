"""Mini-batches on their way from the first forward to the update, and what is left to show of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import Collected
from lightning_asyncpp.pipeline.updates.exchange import ControlSum
from lightning_asyncpp.pipeline.updates.reduction import Reduction
from lightning_asyncpp.pipeline.updates.ticket import Ticket
from lightning_asyncpp.pipeline.updates.tied_gradients import TiedGradients
from lightning_asyncpp.pipeline.updates.update import ControlMessage, Payload, PendingUpdate


@dataclass
class MiniBatch:
    """Micro-batches that share one update.

    Attributes:
        index: t.
        first: its first micro-batch.
        end: one past its last micro-batch; None while more may come (gradient accumulation).
        weight: sum of the micro-batches' weights so far; known on the last stage.
        ticket: hyper-parameters for its update.
        payload: what the last stage attaches to the control message.
        exchange: of its control messages, once it is complete.
        reduction: of its gradient over the replicas, once that has begun; None with one replica.
        tied: exchange of the gradients that other stages share, once it is complete; None if there are none.
        counted: what this stage's layers counted in its micro-batches.
        pending: its gradient on the way to the optimizer, once complete.
        stepped: whether this stage has stepped ahead of the others.
    """

    index: int
    first: int
    end: int | None = None
    weight: float = 0.0
    ticket: Ticket | None = None
    payload: Payload = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    exchange: ControlSum | None = None
    reduction: Reduction | None = None
    tied: TiedGradients | None = None
    counted: Collected = field(default_factory=Collected)
    pending: PendingUpdate | None = None
    stepped: bool = False


@dataclass(frozen=True)
class Update:
    """An update that is being, or was, applied.

    Attributes:
        mini_batch: t, of the gradient; the update makes W_{t+1}.
        ticket: hyper-parameters that were set for mini-batch t.
        message: what all ranks agreed on.
        skipped: whether weights and optimizer were left alone.
        weights_before: parameter -> W_t, alive as the older version; None without a delay.
    """

    mini_batch: int
    ticket: Ticket
    message: ControlMessage
    skipped: bool
    weights_before: dict[nn.Parameter, Tensor] | None
