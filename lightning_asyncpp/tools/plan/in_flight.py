"""What a schedule makes of the memory of single micro-batches: all that is alive on a stage, action by action."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from lightning_asyncpp.core.schedule import Action, Kind, Schedule
from lightning_asyncpp.tools.plan.stage_run import Profile

_MINI_BATCHES = 4
"""After three of them nothing changes from one to the next any more."""


@dataclass(frozen=True)
class StageSchedule:
    """How one stage is run.

    Attributes:
        schedule: the order of its actions.
        micro_batches: per batch, m.
        accumulated: batches per update.
        on_host: whether the stage computes on the host, where messages between hosts are part of its memory.
    """

    schedule: Schedule
    micro_batches: int
    accumulated: int = 1
    on_host: bool = True


@dataclass(frozen=True)
class Memory:
    """What is alive on a stage when it is most, in bytes.

    Attributes:
        weights, versions, buffers, optimizer, correction: as in a profile.
        batch: the tensors of the loader.
        gradients: all sets that are alive.
        activations: what the micro-batches in flight keep.
        messages: what is kept for the stage that shares a weight.
        working: everything else at that moment: results on their way, a micro-batch's own gradients, logits.
        in_flight: number of micro-batches in flight.
        during: what runs then: forward, backward, reduction or update.
    """

    weights: int
    versions: int
    buffers: int
    optimizer: int
    correction: int
    batch: int
    gradients: int
    activations: int
    messages: int
    working: int
    in_flight: int
    during: str

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in PARTS)


PARTS = tuple(f.name for f in fields(Memory) if f.name not in ("in_flight", "during"))
"""Names of what adds up to the total."""


def peak_of(stage: StageSchedule, slots: Sequence[Profile], batch: int) -> Memory:
    """Follow the first mini-batches of a run as the engine executes them.

    Args:
        stage: how it is run.
        slots: what each micro-batch of a batch takes; fewer than m if the batch has fewer samples.
        batch: bytes of a batch on this stage.
    """
    walk = _Walk(stage, slots, batch)
    for _ in range(_MINI_BATCHES):
        walk.run_mini_batch()
    assert walk.peak is not None
    return walk.peak


@dataclass
class _Walk:
    stage: StageSchedule
    slots: Sequence[Profile]
    batch: int
    peak: Memory | None = None
    index: int = 0  # mini-batches that are closed
    next_forward: int = 0
    next_backward: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)  # micro-batch -> what it keeps
    sums: dict[int, int] = field(default_factory=dict)  # mini-batch -> its gradients so far
    pending: deque[int] = field(default_factory=deque)  # gradients that are whole, oldest first
    updates: int = 0

    def run_mini_batch(self) -> None:
        schedule, t, first = self.stage.schedule, self.index, self.next_forward
        self._act(schedule.batch(first, self._per_update, self.next_backward, t, first))
        self.index += 1
        if schedule.pipeline_rule.flushes(t):
            self._act(schedule.drain(self.next_backward, self.next_forward))
        self._launch()
        while self.updates < schedule.stage_rule.updates_due(t):
            self._update()

    @property
    def _per_update(self) -> int:
        return self.stage.micro_batches * self.stage.accumulated

    def _act(self, actions: Iterator[Action]) -> None:
        for action in actions:
            if action.kind is Kind.UPDATE:
                self._update()
                continue
            position = action.index % self.stage.micro_batches
            profile = self.slots[position] if position < len(self.slots) else None  # an empty slot
            if action.kind is Kind.FORWARD:
                self.next_forward = action.index + 1
                if profile is not None:
                    self._note(profile.forward.peak, "forward")
                    self.in_flight[action.index] = profile.forward.kept
            else:
                if profile is not None:
                    self._backward(action.index, profile)
                self.next_backward = action.index + 1
                self._launch()

    def _update(self) -> None:
        self._note(self.slots[0].update.peak, "update")
        self.pending.popleft()
        self.updates += 1

    def _backward(self, k: int, profile: Profile) -> None:
        t = k // self._per_update
        reading = profile.backward_again if t in self.sums else profile.backward
        peak = reading.peak
        if profile.backward_reduced is not None and t < self.index and (k + 1) % self._per_update == 0:
            peak = profile.backward_reduced.peak + (0 if t in self.sums else profile.gradients)
        self._note(peak, "backward")
        del self.in_flight[k]
        self.sums.setdefault(t, profile.gradients)

    def _launch(self) -> None:
        """Take the gradients of mini-batches that are closed and whole."""
        for t in [t for t in self.sums if t < self.index and self.next_backward >= (t + 1) * self._per_update]:
            profile = self.slots[0]
            reduced = profile.gradients if profile.backward_reduced is not None else 0
            # A shared gradient is packed and sent off, and the other stage's is added to it.
            working = reduced + 2 * profile.tied
            if working:
                self._note(working, "reduction")
            self.pending.append(self.sums.pop(t))

    def _messages(self, during: str) -> int:
        """What the stage that shares a weight has sent, on the host: of all mini-batches that ended here, at most."""
        there = self.index - self.updates - (during == "update")
        return self.slots[0].tied * there if self.stage.on_host else 0

    def _note(self, working: int, during: str) -> None:
        """Keep this moment if it is the one with the most."""
        profile, schedule = self.slots[0], self.stage.schedule
        batches = 2 if schedule.depth and schedule.pipeline_rule.delay else 1
        now = Memory(
            profile.weights, profile.versions, profile.buffers, profile.optimizer, profile.correction,
            self.batch * batches, sum(self.sums.values()) + sum(self.pending), sum(self.in_flight.values()),
            self._messages(during), working, len(self.in_flight) + (during == "forward"), during,
        )  # fmt: skip
        if self.peak is None or now.total > self.peak.total:
            self.peak = now
