"""Recordings of simulated schedules, in which the work and the waits of every stage are known exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_asyncpp.core.schedule import Kind, Schedule, Slack, Staleness, StalenessRule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.trace import Activity, Span, Wait
from lightning_asyncpp.strategy_parts.recording import Meta, TraceFile
from lightning_asyncpp.tools.recorded_run import RecordedRun, read_run

_WAITS = {Kind.FORWARD: Wait.ACTIVATION, Kind.BACKWARD: Wait.GRADIENT, Kind.UPDATE: Wait.AGREEMENT}


@dataclass(frozen=True)
class Recording:
    """Recording of a simulated run; times are in seconds."""

    stages: int = 2
    replicas: int = 1
    microbatches: int = 4
    mini_batches: int = 3
    lookahead: int = 0
    delay: int = 1
    forward: float | Sequence[float] = 0.010
    backward: float | Sequence[float] = 0.020
    staleness: Staleness = "uniform"
    slack: Slack = 0
    hop: float = 0.0

    def lanes(self) -> list[list[Span]]:
        """Return the spans of each stage, waits and sends included."""
        schedules = self.schedules()
        lengths = self._length(self.forward), self._length(self.backward)
        lanes = simulate(schedules, self.mini_batches, self.microbatches, *lengths, self.hop)
        return [self._filled(lane, schedule) for lane, schedule in zip(lanes, schedules)]

    def schedules(self) -> list[Schedule]:
        """Return the schedule of each stage."""
        rule = StalenessRule(self.delay)
        return [
            Schedule(stage, self.stages, self.lookahead, rule, self.staleness, self.slack)
            for stage in range(self.stages)
        ]

    def write(self, folder: Path) -> Path:
        """Write the files that such a run would have left, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        lanes = self.lanes()
        for replica in range(self.replicas):
            for stage, schedule in enumerate(self.schedules()):
                rank = replica * self.stages + self.stages - 1 - stage
                file = TraceFile(
                    folder / f"rank-{rank:05d}.json", Meta(rank, replica, self.replicas, 3, "host", schedule), 500.0
                )
                file.add(lanes[stage], lambda k: divmod(k, self.microbatches))
                file.close()
        return folder

    def read(self, folder: Path) -> RecordedRun:
        """Write the recording and read it back."""
        return read_run(self.write(folder))

    def _length(self, seconds: float | Sequence[float]) -> Callable[[int, int], float]:
        return lambda stage, _: seconds[stage] if isinstance(seconds, Sequence) else seconds

    def _filled(self, lane: list[Span], schedule: Schedule) -> list[Span]:
        spans: list[Span] = []
        now = 0.0
        for span in lane:
            if span.start > now:
                spans.append(Span(_WAITS[span.kind], span.index, now, span.start))  # type: ignore[index]
            spans.append(self._with_version(span, schedule))
            now = span.end
            leaves = span.kind is Kind.FORWARD and schedule.stage < self.stages - 1
            returns = span.kind is Kind.BACKWARD and schedule.stage > 0
            if leaves or returns:
                spans.append(Span(Activity.SEND, span.index, now, now, num_bytes=1000))
        return spans

    def _with_version(self, span: Span, schedule: Schedule) -> Span:
        if span.kind is Kind.UPDATE:
            return replace(span, version=span.index + 1)
        version = schedule.stage_rule.version(*divmod(span.index, self.microbatches))
        return replace(span, version=version)
