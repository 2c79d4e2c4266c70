"""Recordings made from simulated schedules: what every stage does, and waits for, is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_asyncpp.core.recording.trace_file import Meta, SpanFile, file_name

from lightning_asyncpp.core.schedule import Kind, Schedule, Slack, Staleness, StalenessRule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.trace import Beside, Span, Wait
from lightning_asyncpp.tools.trace.recorded_run import RecordedRun, read_run

_WAITS = {Kind.FORWARD: Wait.ACTIVATION, Kind.BACKWARD: Wait.GRADIENT, Kind.UPDATE: Wait.AGREEMENT}


@dataclass(frozen=True)
class Recording:
    """A run that never was; times are in seconds."""

    stages: int = 2
    replicas: int = 1
    micro_batches: int = 4
    mini_batches: int = 3
    lookahead: int = 0
    delay: int = 1
    forward: float | Sequence[float] = 0.010
    backward: float | Sequence[float] = 0.020
    sent: int = 1000
    origin: float = 500.0
    start: int = 0
    staleness: Staleness = "uniform"
    slack: Slack = 0
    tied: tuple[int, ...] = ()

    def lanes(self) -> list[list[Span]]:
        """Spans of each stage, waits and sends included."""
        schedules = self.schedules()
        lanes = simulate(
            schedules, self.mini_batches, self.micro_batches, self._length(self.forward), self._length(self.backward)
        )
        return [self._filled(lane, schedule) for lane, schedule in zip(lanes, schedules)]

    def schedules(self) -> list[Schedule]:
        """Of each stage."""
        return [self._schedule(stage) for stage in range(self.stages)]

    def _schedule(self, stage: int) -> Schedule:
        rule, shared = StalenessRule(self.delay, self.start), min(self.tied) if stage in self.tied else None
        return Schedule(stage, self.stages, self.lookahead, rule, self.staleness, self.slack, shared)

    def _length(self, seconds: float | Sequence[float]) -> Callable[[int, int], float]:
        return lambda stage, _: seconds[stage] if isinstance(seconds, Sequence) else seconds

    def metas(self) -> list[Meta]:
        """Of all ranks, as a mesh of this size places them."""
        return [
            Meta(
                replica * self.stages + self.stages - 1 - stage, stage, replica, self.stages, self.replicas,
                self.micro_batches, self.lookahead, self.delay, "host", self.origin, 0.0, 0.0, 1.7e9, "0", "2",
                self.start, 0, self._schedule(stage).stage_rule.held, self.staleness, self.slack,
                self._schedule(stage).shares_with,
            )
            for replica in range(self.replicas)
            for stage in range(self.stages)
        ]  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Make the files that such a run would have left."""
        folder.mkdir(parents=True, exist_ok=True)
        lanes = self.lanes()
        for meta in self.metas():
            write_rank(folder, meta, lanes[meta.stage], self.micro_batches)
        return folder

    def read(self, folder: Path) -> RecordedRun:
        """Write it, and read it."""
        return read_run(self.write(folder))

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
                spans.append(Span(Beside.SEND, span.index, now, now, num_bytes=self.sent))
        return spans

    def _with_version(self, span: Span, schedule: Schedule) -> Span:
        if span.kind is Kind.UPDATE:
            return replace(span, version=span.index + 1)
        return replace(span, version=schedule.stage_rule.version(*divmod(span.index, self.micro_batches)))


def write_rank(folder: Path, meta: Meta, spans: Sequence[Span], micro_batches: int) -> None:
    """The file of one rank; times of ``spans`` count from its origin."""
    file = SpanFile(folder / file_name(meta.rank), meta)
    shifted = [replace(span, start=span.start + meta.origin, end=span.end + meta.origin) for span in spans]
    seen = set()
    for span in shifted:
        if span.kind is Kind.FORWARD and (t := span.index // micro_batches) not in seen:
            seen.add(t)
            file.begin_batch(t, t * micro_batches, meta.origin if t == 0 else span.start)
    file.add(shifted)
    file.close(max((span.end for span in shifted), default=meta.origin))
