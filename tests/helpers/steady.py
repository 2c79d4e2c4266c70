"""How busy simulated stages are between two mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span, utilisation


def steady_utilisation(
    lanes: Sequence[Sequence[Span]], microbatches: int, first_batch: int, last_batch: int
) -> tuple[float, float]:
    """Time per mini-batch, and the share of it that the busiest stage works, between two mini-batches.

    Args:
        lanes: what :func:`simulate` returned.
        microbatches: per mini-batch.
        first_batch: the time from the end of this mini-batch's last backward counts, on the first stage,
        last_batch: until the end of this one's.
    """
    ends = {span.index: span.end for span in lanes[0] if span.kind is Kind.BACKWARD}
    start, end = (ends[(t + 1) * microbatches - 1] for t in (first_batch, last_batch))
    return (end - start) / (last_batch - first_batch), max(utilisation(lane, start, end) for lane in lanes)
