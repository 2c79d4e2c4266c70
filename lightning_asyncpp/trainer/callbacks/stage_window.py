"""What one stage did in its last batches, from its spans: how much of the time was work, and how old gradients are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_asyncpp.core.recording.trace import Span, Wait
from lightning_asyncpp.core.schedule import Kind, StalenessRule


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
        stage: this stage.
        rules: which weights every stage is to run on.
        trained: numbers in parameters that are trained, on every stage.
        size: number of batches that are averaged.

    Attributes:
        by_stage: updates by which every stage's gradients of the newest mini-batch are too old, the mean of the
            micro-batches that this stage has looked at so far; empty if unknown.
        differ: whether stages hold back different numbers of micro-batches.
    """

    def __init__(self, stage: int, rules: Sequence[StalenessRule], trained: Sequence[int], size: int) -> None:
        self.stage, self.rules, self._trained = stage, rules, trained
        self.by_stage: list[float] = []
        self.differ = len({rule.held for rule in rules}) > 1
        self._batches: deque[BatchTimes] = deque(maxlen=size)
        self._begun = (-1, -1)  # the newest mini-batch, and the first micro-batch of it
        self._places: list[int] = []  # of its micro-batches that ran as promised
        self._ends: dict[int, int] = {}  # mini-batch -> one past its last micro-batch
        self._backwards: deque[tuple[int, float]] = deque(maxlen=4096)  # micro-batch, end
        self._waited_for = -1  # the newest mini-batch for whose replicas or agreement this stage has waited

    def add(self, mini_batch: int, first: int, end: int, elapsed: float | None, spans: Iterable[Span]) -> None:
        """Take in a batch.

        Args:
            mini_batch: that it belongs to.
            first: the first micro-batch of that, which an earlier batch may have had; those before it that this batch
                ran have no update: their gradient was dropped.
            end: one past its last micro-batch.
            elapsed: in seconds; None if it is not known, because a validation came before it.
            spans: that ended since the batch before.

        Raises:
            StalenessError: a forward ran on other weights than promised.
        """
        if self._begun != (mini_batch, first):
            self._begun, self._places = (mini_batch, first), []
        self._ends = {t: e for t, e in self._ends.items() if t > mini_batch - 4} | {mini_batch: end}
        batch = BatchTimes(elapsed or 0.0)
        for span in spans:
            if span.kind is Kind.FORWARD and span.index >= first:
                self._check(mini_batch, span.index - first, span)
            elif span.kind is Kind.BACKWARD:
                self._backwards.append((span.index, span.end))
            elif span.kind is Wait.AGREEMENT:
                batch.exposed += span.end - span.start
                # A stage that steps ahead waits for its update first, and later for what the others say of it.
                since = span.start if span.index == self._waited_for else self._completed(span)
                batch.underway += span.end - min(since, span.start)
                self._waited_for = span.index
            if span.kind in (Kind.FORWARD, Kind.BACKWARD):
                batch.work += span.end - span.start
        self.by_stage = [self._staleness(mini_batch, rule) for rule in self.rules] if self._places else []
        if elapsed is not None:
            self._batches.append(batch)

    @property
    def staleness(self) -> float | None:
        """Updates by which the gradient of the newest mini-batch is too old: the mean over all that is trained."""
        if not self.by_stage or not any(self._trained):
            return None
        return sum(mean * count for mean, count in zip(self.by_stage, self._trained)) / sum(self._trained)

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

    def _staleness(self, mini_batch: int, rule: StalenessRule) -> float:
        return sum(mini_batch - rule.version(mini_batch, place) for place in self._places) / len(self._places)

    def _check(self, mini_batch: int, place: int, span: Span) -> None:
        if span.version < 0:
            return
        promised = self.rules[self.stage].version(mini_batch, place)
        if span.version != promised:
            raise StalenessError(
                f"micro-batch {span.index} of mini-batch {mini_batch} ran on W{span.version} on stage {self.stage}, not"
                f" on W{promised}: its gradient is {mini_batch - span.version} updates old instead of"
                f" {mini_batch - promised}; please report this"
            )
        self._places.append(place)

    def _completed(self, wait: Span) -> float:
        """When the last backward of the mini-batch ended whose update was waited for."""
        end = self._ends.get(wait.index)
        if end is None:
            return wait.start
        # From the newest on, which is one of the last few; backwards run in the order of their micro-batches.
        return next((time for k, time in reversed(self._backwards) if k < end), wait.start)
