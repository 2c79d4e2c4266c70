"""Time that each stage of a recorded run spent on its activities, compared with an ideal run of the schedule."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_asyncpp.core.schedule import Kind, largest_lookahead
from lightning_asyncpp.core.simulation import Pace, pace_of
from lightning_asyncpp.core.trace import WORK, Activity, seconds_by_kind
from lightning_asyncpp.strategy_parts.recording import NAMES
from lightning_asyncpp.tools.parsers import columns, metric
from lightning_asyncpp.tools.recorded_run import RankTrace, RecordedRun

CAUSES = {
    "activation": "waiting for the stage before",
    "gradient": "waiting for the stage after",
    "drain": "waiting while the pipeline is emptied",
    "send": "handing over messages",
    "agreement": "waiting for the other ranks' part of an update",
    "update": "optimizer steps",
    "data": "waiting for the loader, and the loop's work between batches",
    "evaluate": "validation",
    "checkpoint": "saving",
    "rest": "time that no recorded activity covers",
}
"""Causes of time outside of forwards and backwards, with their meanings."""


@dataclass(frozen=True)
class Row:
    """Use of time on a stage.

    Attributes:
        name: name of the stage, or ``"all"``.
        shares: "forward", "backward" or a cause -> share of the elapsed time; shares add up to 1.
        ideal: share of forwards and backwards in an ideal run, in which only they take time; None if unknown.
        forward_ms: median time of a forward.
        backward_ms: median time of a backward.
        bytes_sent: bytes of all messages that this stage sent.
        staleness: mean delay of gradients, in updates, without the initial mini-batches that have no delay.
    """

    name: str
    shares: dict[str, float]
    ideal: float | None
    forward_ms: float
    backward_ms: float
    bytes_sent: int
    staleness: float | None

    @property
    def utilisation(self) -> float:
        """Share of the elapsed time inside forwards and backwards."""
        return self.shares["forward"] + self.shares["backward"]


@dataclass(frozen=True)
class Summary:
    """Use of time on all stages.

    Attributes:
        seconds: elapsed time in seconds.
        mini_batches: first and last mini-batch that began in this time.
        rows: rows of the stages.
        total: row of all stages: means of shares and delays, medians of times, sum of bytes.
        ideal_step: seconds per mini-batch in an ideal run: forwards and backwards take their median times, and nothing
            else takes time.
        balance: time of the busiest stage in forwards and backwards, divided by the mean over all stages.
        layers: number of layers of each stage.
        notes: notes on the recording.
    """

    seconds: float
    mini_batches: tuple[int, int]
    rows: Sequence[Row]
    total: Row
    ideal_step: float | None
    balance: float
    layers: Sequence[int]
    notes: Sequence[str]

    @property
    def step(self) -> float:
        """Seconds per mini-batch."""
        first, last = self.mini_batches
        return self.seconds / (last - first + 1)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as values for JSON."""
        rows = [asdict(row) | {"utilisation": row.utilisation} for row in (*self.rows, self.total)]
        return asdict(self) | {"rows": rows[:-1], "total": rows[-1], "step": self.step}


def summarise(run: RecordedRun) -> Summary:
    """Summarise the use of time in a run."""
    rows: list[Row] = []
    paces: list[Pace | None] = []
    for stages in run.replicas():
        paces.append(ideal_of(stages))
        ideals = [None] * len(stages) if paces[-1] is None else paces[-1].work
        rows += [_row(run, stage, ideal) for stage, ideal in zip(stages, ideals)]
    known = [pace.step for pace in paces if pace is not None]
    busy = [row.utilisation for row in rows]
    batches = run.mini_batches
    return Summary(
        run.seconds, (batches.start, batches.stop - 1), rows, _total(rows),
        max(known) if len(known) == len(paces) else None, max(busy) / (statistics.fmean(busy) or 1.0),
        [stage.meta.layers for stage in run.replicas()[0]], run.notes,
    )  # fmt: skip


def ideal_of(stages: Sequence[RankTrace]) -> Pace | None:
    """Simulate the schedule of a replica with its stages' median times; return None if a time is unknown."""
    forward, backward = ([_median(stage, kind) for stage in stages] for kind in WORK)
    if len(stages) != stages[0].meta.schedule.num_stages or None in (*forward, *backward):
        return None
    return pace_of(
        [stage.meta.schedule for stage in stages], stages[0].microbatches,
        lambda stage, _: forward[stage] or 0.0, lambda stage, _: backward[stage] or 0.0,
    )  # fmt: skip


def _row(run: RecordedRun, rank: RankTrace, ideal: float | None) -> Row:
    spent = seconds_by_kind(rank.spans, 0.0, run.seconds)
    seconds = dict.fromkeys(("forward", "backward", *CAUSES), 0.0)
    for kind, value in spent.items():
        seconds[NAMES[kind] if isinstance(kind, Kind) else str(getattr(kind, "value", kind))] += value
    begun = rank.meta.schedule.pipeline_rule.synchronous_start
    ages = [t - span.version for span in rank.of(Kind.FORWARD) if (t := rank.mini_batch(span)) > begun]
    sent = sum(span.num_bytes for span in rank.of(Activity.SEND))
    return Row(
        rank.meta.name, {cause: value / run.seconds for cause, value in seconds.items()}, ideal,
        1e3 * (_median(rank, Kind.FORWARD) or 0.0), 1e3 * (_median(rank, Kind.BACKWARD) or 0.0), sent,
        statistics.fmean(ages) if ages else None,
    )  # fmt: skip


def _total(rows: Sequence[Row]) -> Row:
    shares = {cause: statistics.fmean(row.shares[cause] for row in rows) for cause in rows[0].shares}
    return Row(
        "all", shares, _mean([row.ideal for row in rows]), statistics.median(row.forward_ms for row in rows),
        statistics.median(row.backward_ms for row in rows), sum(row.bytes_sent for row in rows),
        _mean([row.staleness for row in rows]),
    )  # fmt: skip


def _median(rank: RankTrace, kind: Kind) -> float | None:
    lengths = [span.end - span.start for span in rank.of(kind)]
    return statistics.median(lengths) if lengths else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


_SHORT = {"activation": "activ.", "agreement": "agree", "checkpoint": "save", "evaluate": "val."}
_RARE = ("drain", "evaluate", "checkpoint")
_WIDTH = 120
_SHORT_WAIT = 0.2  # below it lookahead, which makes gradients older, hardly pays


def table(run: RecordedRun, summary: Summary) -> str:
    """Return the use of time on every stage in per cent of the elapsed time, with headline, legend and notes."""
    shown = _causes(summary)
    titles = ["", "busy", "ideal", *(_SHORT.get(cause, cause) for cause in shown)]
    titles += ["F ms", "B ms", "sent", "stale"]
    head, *lines, total = columns([titles, *(_cells(row, shown) for row in (*summary.rows, summary.total))])
    rule = "-" * max(map(len, (head, *lines, total)))
    meanings = "; ".join(f"{_SHORT.get(cause, cause)} = {CAUSES[cause]}" for cause in shown)
    explained = f"Per cent of the elapsed time; busy and the columns activ. to rest add up to 100. {meanings}."
    rows = [head, rule, *lines, *([rule, total] if len(lines) > 1 else [])]
    return "\n".join(
        [headline(run, summary), "", *rows, "", *textwrap.wrap(explained, _WIDTH), "", *statements(run, summary)]
    )


def headline(run: RecordedRun, summary: Summary) -> str:
    """Return a line on the pipeline and the recorded mini-batches."""
    first, last = summary.mini_batches
    schedule, replicas = run.meta.schedule, run.meta.num_replicas
    flush = f"lookahead {schedule.lookahead}, no flush" if schedule.pipeline_rule.delay else "a flush per mini-batch"
    return (
        f"{schedule.num_stages} stages{f' x {replicas} replicas' if replicas > 1 else ''},"
        f" {run.ranks[0].microbatches} microbatches per mini-batch, {flush}; mini-batches {first} to {last}:"
        f" {summary.seconds:.3f} s"
    )


def _causes(summary: Summary) -> list[str]:
    return [cause for cause in CAUSES if cause not in _RARE or any(row.shares[cause] > 0 for row in summary.rows)]


def _cells(row: Row, shown: list[str]) -> list[str]:
    return [
        row.name, _percent(row.utilisation), _percent(row.ideal), *(_percent(row.shares[cause]) for cause in shown),
        f"{row.forward_ms:.2f}", f"{row.backward_ms:.2f}", f"{metric(row.bytes_sent)}B",
        "-" if row.staleness is None else f"{row.staleness:.2f}",
    ]  # fmt: skip


def statements(run: RecordedRun, summary: Summary) -> list[str]:
    """Return the findings of the recording as sentences."""
    lines = []
    if summary.ideal_step:
        lines.append(
            "Ideal: if forwards and backwards took each stage's median times, and nothing else took time, a mini-batch"
            f" would take {1e3 * summary.ideal_step:.1f} ms; it took {1e3 * summary.step:.1f} ms,"
            f" {summary.step / summary.ideal_step:.2f} times as long."
        )
    if len(summary.rows) > 1:
        busiest = max(summary.rows, key=lambda row: row.utilisation).name
        lines.append(
            f"Balance: the busiest stage, {busiest}, computes {summary.balance:.2f} times as long as the average;"
            f" layers per stage: {', '.join(map(str, summary.layers))}."
        )
    return [*lines, *_waits(run, summary), *(f"Note: {note}." for note in summary.notes)]


def _waits(run: RecordedRun, summary: Summary) -> list[str]:
    """Return how long stages wait for each other without lookahead, and which lookahead hides slow links.

    A lookahead of P - 1, or 1 for a link in the middle alone, hides hops of up to half of a stage's time per
    microbatch. More of it hides longer hops, but makes gradients so much older that it needs many microbatches.
    """
    schedule, busy, ideal = run.meta.schedule, summary.total.utilisation, summary.total.ideal
    hops = schedule.num_stages - 1
    if not (hops and busy and ideal and schedule.pipeline_rule.delay) or schedule.lookahead:
        return []
    waits = summary.total.shares["activation"] + summary.total.shares["gradient"] - (1 - ideal)
    longer = waits / busy
    most = largest_lookahead(schedule.num_stages, run.ranks[0].microbatches, run.meta.num_replicas)
    if longer < _SHORT_WAIT or not most:
        return []
    middle = "lookahead=1 hides one between the two halves of the stages, " if min(hops, most) > 1 and hops % 2 else ""
    return [
        f"Waits: stages wait for each other, so that an update takes {1 + longer:.1f} times as long. If slow links are"
        f" the reason, {middle}lookahead={min(hops, most)} hides {'all' if middle else 'them'}, or a part of them."
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
