"""What a recorded run comes to, a row per stage and one for all, beside what its schedule could do at best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_asyncpp.core.recording.trace import Beside, Span, utilisation
from lightning_asyncpp.core.recording.trace_file import Meta
from lightning_asyncpp.core.schedule import Kind, Schedule, StalenessRule
from lightning_asyncpp.tools.ideal import simulate
from lightning_asyncpp.tools.trace.causes import (
    WORK,
    Episode,
    Underway,
    find_episodes,
    phases_of,
    seconds_by_cause,
    underway,
)
from lightning_asyncpp.tools.trace.recorded_run import RankTrace, RecordedRun
from lightning_asyncpp.tools.trace.staleness import Versions, check_versions


@dataclass(frozen=True)
class Balance:
    """Computation of the stages against each other.

    Attributes:
        busiest: the stage that computes most.
        imbalance: its forwards and backwards over the mean of all stages'; 1 is even.
        layers: of each stage, first stage first; empty if they were not recorded.
    """

    busiest: int
    imbalance: float
    layers: tuple[int, ...] = ()

    def sentence(self) -> str:
        """For the table."""
        cut = f"; layers per stage: {', '.join(map(str, self.layers))}" if self.layers else ""
        return (
            f"Balance: the busiest stage, stage {self.busiest}, computes {self.imbalance:.2f} times the mean of the"
            f" stages{cut}."
        )


def balance_of(seconds: Mapping[int, float], layers: Mapping[int, int]) -> Balance | None:
    """Compare the stages; None if there is only one, or nothing was computed.

    Args:
        seconds: stage -> its time inside forwards and backwards, summed over the replicas.
        layers: stage -> its number of layers, 0 if it is not known.
    """
    mean = sum(seconds.values()) / max(len(seconds), 1)
    if len(seconds) < 2 or mean <= 0:
        return None
    busiest = max(seconds, key=lambda stage: seconds[stage])
    known = tuple(layers[stage] for stage in sorted(layers))
    return Balance(busiest, seconds[busiest] / mean, known if all(known) else ())


_LEAD = 3  # mini-batches that are simulated around a piece of a run: the pipeline is as full as it was


@dataclass(frozen=True)
class Ideal:
    """The same actions without overheads.

    Attributes:
        seconds: how long they would take.
        utilisation: of each stage, first stage first.
    """

    seconds: float
    utilisation: Sequence[float]


def ideal_of(stages: Sequence[RankTrace], episodes: Sequence[Episode]) -> Ideal | None:
    """Run the schedule of a replica's recorded episodes with its stages' median times.

    Returns:
        None if a stage is missing, or did not run a forward and a backward.
    """
    meta = stages[0].meta
    times = [(_median(stage, Kind.FORWARD), _median(stage, Kind.BACKWARD)) for stage in stages]
    if len(stages) != meta.num_stages or any(None in pair for pair in times):
        return None
    forward, backward = [f or 0.0 for f, _ in times], [b or 0.0 for _, b in times]
    schedules = [_schedule(stage.meta) for stage in stages]
    seconds, busy = 0.0, [0.0] * len(stages)
    for episode in episodes:
        lanes, start, end = _run(episode, schedules, stages[0].micro_batches, forward, backward)
        seconds += end - start
        busy = [b + utilisation(lane, start, end) * (end - start) for b, lane in zip(busy, lanes)]
    return Ideal(seconds, [b / seconds for b in busy]) if seconds > 0 else None


def _schedule(meta: Meta) -> Schedule:
    """The stage's own; of recordings without a staleness one that holds back as many micro-batches."""
    schedule = Schedule(meta.stage, meta.num_stages, meta.lookahead, StalenessRule(meta.delay))
    if meta.staleness is not None:
        return replace(schedule, staleness=meta.staleness, slack=meta.slack or 0, shares_with=meta.shares_with)
    if meta.held is None:
        return schedule
    return replace(schedule, staleness="least", slack=meta.held - schedule.depth)


def _run(
    episode: Episode, schedules: Sequence[Schedule], micro_batches: int, forward: list[float], backward: list[float]
) -> tuple[list[list[Span]], float, float]:
    """The lanes of an episode, and from when to when they stand for it; a flush ends each mini-batch by itself."""
    count = max(1, round((episode.last + 1 - episode.first) / micro_batches))
    before, after = _LEAD * episode.cut_before, _LEAD * episode.cut_after
    lanes = simulate(
        schedules,
        before + count + after,
        micro_batches,
        lambda stage, _: forward[stage],
        lambda stage, _: backward[stage],
    )
    begins = {span.index: span.start for span in lanes[0] if span.kind is Kind.FORWARD}
    ends = max(span.end for lane in lanes for span in lane)
    return lanes, begins[before * micro_batches], begins.get((before + count) * micro_batches, ends)


def _median(stage: RankTrace, kind: Kind) -> float | None:
    lengths = [span.end - span.start for span in stage.spans if span.kind is kind]
    return statistics.median(lengths) if lengths else None


@dataclass(frozen=True)
class Row:
    """What a stage did with its time.

    Attributes:
        name: of the stage, or ``"all"``.
        shares: cause -> share of the elapsed time; they add up to 1.
        ideal: utilisation of the same actions without overheads; None if it is not known.
        forward_ms, backward_ms: the median of one.
        bytes_sent: in activations, gradients and other messages of this stage.
        bytes_reduced: over the replicas.
        hidden: share of the time of reductions and agreements that the stage did not wait for.
        versions: lowest and highest W_v that it ran on.
        staleness: updates between the weights of a gradient and those it is applied to, in words.
        stale_share: share of the micro-batches on weights before the newest, where the delay has begun.
    """

    name: str
    shares: dict[str, float]
    ideal: float | None
    forward_ms: float
    backward_ms: float
    bytes_sent: int
    bytes_reduced: int
    hidden: float | None
    versions: tuple[int, int] | None
    staleness: str
    stale_share: float | None = None

    @property
    def utilisation(self) -> float:
        """Share of the elapsed time inside forwards and backwards."""
        return sum(self.shares[name] for name in WORK)


@dataclass(frozen=True)
class Summary:
    """What all stages did with their time.

    Attributes:
        seconds: how much time is explained.
        mini_batches: first and last that began in it.
        rows: of the stages.
        total: of all of them: means of shares, sums of bytes.
        ideal_seconds: how long the same actions would take without overheads.
        violations: what breaks the promise of the staleness, in words; at most a handful per stage.
        violated: how often it is broken.
        notes: what a reader should know of the recording.
        balance: how evenly the stages compute; None with one stage, or if recordings of stages are missing.
    """

    seconds: float
    mini_batches: tuple[int, int]
    rows: Sequence[Row]
    total: Row
    ideal_seconds: float | None
    violations: Sequence[str]
    violated: int
    notes: Sequence[str]
    balance: Balance | None = None

    def as_json(self) -> dict[str, Any]:
        """All of it, for other programs."""
        rows = [asdict(row) | {"utilisation": row.utilisation} for row in (*self.rows, self.total)]
        return asdict(self) | {"rows": rows[:-1], "total": rows[-1]}


def summarise(run: RecordedRun) -> Summary:
    """Explain the time of a run."""
    rows, ideals = [], []
    underways: list[Underway | None] = []
    versions: list[Versions] = []
    for stages in run.replicas():
        episodes = find_episodes(stages)
        ideal = ideal_of(stages, episodes)
        ideals.append(ideal)
        for place, stage in enumerate(stages):
            underways.append(underway(stage, run.ranks) if run.is_whole else None)
            versions.append(check_versions(stage))
            best = ideal.utilisation[place] if ideal is not None else None
            rows.append(_row(run, stage, (stages, episodes), best, underways[-1], versions[-1]))
    batches = run.mini_batches
    return Summary(
        run.seconds, (batches.start, batches.stop - 1), rows, _total(rows, underways, versions), _longest(ideals),
        [problem for found in versions for problem in found.violations], sum(v.violated for v in versions), run.notes,
        _balance(run, rows),
    )  # fmt: skip


def _balance(run: RecordedRun, rows: Sequence[Row]) -> Balance | None:
    if not run.is_whole:
        return None
    metas = [rank.meta for stages in run.replicas() for rank in stages]
    seconds = dict.fromkeys(range(run.meta.num_stages), 0.0)
    for meta, row in zip(metas, rows):
        seconds[meta.stage] += row.utilisation * run.seconds
    return balance_of(seconds, {meta.stage: meta.layers for meta in metas})


def _row(
    run: RecordedRun,
    stage: RankTrace,
    replica: tuple[list[RankTrace], list[Episode]],
    ideal: float | None,
    underway: Underway | None,
    versions: Versions,
) -> Row:
    phases = phases_of(stage, *replica, run.end)
    seconds = seconds_by_cause(stage.spans, phases, run.start, run.end)
    return Row(
        stage.name, {cause: value / run.seconds for cause, value in seconds.items()}, ideal,
        _median_ms(stage, Kind.FORWARD), _median_ms(stage, Kind.BACKWARD), _bytes(stage, Beside.SEND),
        _bytes(stage, Beside.REDUCE), underway.hidden if underway else None, versions.versions, versions.in_words,
        versions.stale_share,
    )  # fmt: skip


def _total(rows: Sequence[Row], underways: Sequence[Underway | None], versions: Sequence[Versions]) -> Row:
    shares = {cause: statistics.fmean(row.shares[cause] for row in rows) for cause in rows[0].shares}
    known = [u for u in underways if u is not None]
    every = Underway(sum(u.seconds for u in known), sum(u.exposed for u in known))
    seen = [v.versions for v in versions if v.versions is not None]
    ideals = [row.ideal for row in rows if row.ideal is not None]
    stale = [v.stale_share for v in versions if v.stale_share is not None]
    return Row(
        "all", shares, statistics.fmean(ideals) if len(ideals) == len(rows) else None,
        statistics.median(row.forward_ms for row in rows), statistics.median(row.backward_ms for row in rows),
        sum(row.bytes_sent for row in rows), sum(row.bytes_reduced for row in rows), every.hidden,
        (min(v[0] for v in seen), max(v[1] for v in seen)) if seen else None, _in_words(versions),
        statistics.fmean(stale) if stale else None,
    )  # fmt: skip


def _in_words(versions: Sequence[Versions]) -> str:
    """How old gradients were on all stages: what they have in common, or from where to where it goes."""
    shares = [v.stale_share for v in versions if v.stale_share is not None]
    if all(share in (0, 1) for share in shares):
        return Versions(None, {n: 1 for v in versions for n in v.staleness}, (), 0).in_words
    least, most = (f"{share:.2f}" for share in (min(shares), max(shares)))
    return least if least == most else f"{least}-{most}"


def _longest(ideals: Sequence[Ideal | None]) -> float | None:
    known = [ideal.seconds for ideal in ideals if ideal is not None]
    return max(known) if known and len(known) == len(ideals) else None


def _median_ms(stage: RankTrace, kind: Kind) -> float:
    return (_median(stage, kind) or 0.0) * 1e3


def _bytes(stage: RankTrace, kind: Beside) -> int:
    return sum(span.num_bytes for span in stage.spans if span.kind is kind)
