"""The last batches of a stage, from its spans: how much of the time was work, and how old gradients are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_asyncpp.pipeline.schedule import Kind, StalenessRule
from lightning_asyncpp.pipeline.trace import Span, Wait


class StalenessError(RuntimeError):
    """Did this mini-batch run on the weights that the schedule promises?"""


@dataclass
class BatchTimes:
    """One batch on one stage.

    Attributes:
        elapsed: from the end of the batch before to its own end, in seconds.
        work: of that inside forwards and backwards.
        underway: from complete gradients to the end of waiting for their updates, in seconds.
        exposed: of that waited.
    """

    elapsed: float = 0.0
    work: float = 0.0
    underway: float = 0.0
    exposed: float = 0.0


class StageWindow:
    """The last batches of this stage.

    Args:
        stage: this stage, for messages.
        rule: which weights it is to run on.
        size: number of batches that are averaged.

    Attributes:
        staleness: updates by which the gradients of the newest mini-batch are too old, on the mean; None if unknown.
    """

    def __init__(self, stage: int, rule: StalenessRule, size: int) -> None:
        self.stage, self.rule = stage, rule
        self.staleness: float | None = None
        self._batches: deque[BatchTimes] = deque(maxlen=size)
        self._ends: dict[int, int] = {}  # mini-batch -> one past its last micro-batch
        self._backwards: deque[tuple[int, float]] = deque(maxlen=4096)  # micro-batch, end

    def add(self, mini_batch: int, end: int, elapsed: float | None, spans: Iterable[Span]) -> None:
        """Take in a batch.

        Args:
            mini_batch: that it belongs to.
            end: one past its last micro-batch.
            elapsed: in seconds; None if it is not known, because a validation came before it.
            spans: that ended since the batch before.

        Raises:
            StalenessError: a forward ran on other weights than promised.
        """
        self._ends = {t: e for t, e in self._ends.items() if t > mini_batch - 4} | {mini_batch: end}
        batch = BatchTimes(elapsed or 0.0)
        ages = []
        for span in spans:
            if span.kind is Kind.FORWARD:
                ages += self._age(mini_batch, span)
            elif span.kind is Kind.BACKWARD:
                self._backwards.append((span.index, span.end))
            elif span.kind is Wait.AGREEMENT:
                batch.exposed += span.end - span.start
                batch.underway += span.end - min(self._completed(span), span.start)
            if span.kind in (Kind.FORWARD, Kind.BACKWARD):
                batch.work += span.end - span.start
        self.staleness = sum(ages) / len(ages) if ages else None
        if elapsed is not None:
            self._batches.append(batch)

    @property
    def bubble(self) -> float | None:
        """Share of the time in which this stage ran neither a forward nor a backward."""
        elapsed = sum(batch.elapsed for batch in self._batches)
        return 1 - sum(batch.work for batch in self._batches) / elapsed if elapsed > 0 else None

    @property
    def hidden(self) -> float | None:
        """Share of the time between complete gradients and their updates in which this stage did not wait for them."""
        underway = sum(batch.underway for batch in self._batches)
        return 1 - sum(batch.exposed for batch in self._batches) / underway if underway > 0 else None

    def _age(self, mini_batch: int, span: Span) -> list[int]:
        if span.version < 0:
            return []
        promised = self.rule.version(mini_batch)
        if span.version != promised:
            raise StalenessError(
                f"micro-batch {span.index} of mini-batch {mini_batch} ran on W{span.version} on stage {self.stage}, not"
                f" on W{promised}: its gradient is {mini_batch - span.version} updates old instead of"
                f" {mini_batch - promised}; please report this"
            )
        return [mini_batch - span.version]

    def _completed(self, wait: Span) -> float:
        """When the last backward of the mini-batch ended whose update was waited for."""
        end = self._ends.get(wait.index)
        if end is None:
            return wait.start
        # From the newest on, which is one of the last few; backwards run in the order of their micro-batches.
        return next((time for k, time in reversed(self._backwards) if k < end), wait.start)
