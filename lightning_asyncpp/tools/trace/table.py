"""The summary as text."""

from __future__ import annotations

import textwrap

from lightning_asyncpp.core.schedule import Schedule
from lightning_asyncpp.tools.text import columns
from lightning_asyncpp.tools.trace.recorded_run import RecordedRun
from lightning_asyncpp.tools.trace.summary import CAUSES, Row, Summary

MEANINGS = {
    "activation": "waiting for the stage before",
    "gradient": "waiting for the stage after",
    "drain": "waiting while the pipeline is emptied",
    "send": "handing over messages",
    "agreement": "waiting for the other ranks' part of an update",
    "update": "optimizer steps",
    "data": "waiting for the loader, and what the loop does between batches",
    "evaluate": "validation",
    "checkpoint": "saving",
    "rest": "what no span covers",
}
_SHORT = {"activation": "activ.", "agreement": "agree", "checkpoint": "save", "evaluate": "val."}
_RARE = ("drain", "evaluate", "checkpoint")
_WIDTH = 120


def table(run: RecordedRun, summary: Summary) -> str:
    """Return where the time of every stage went, in per cent of the elapsed time, and what else a recording shows."""
    shown = _causes(summary)
    titles = ["", "busy", "ideal", *(_SHORT.get(cause, cause) for cause in shown)]
    titles += ["F ms", "B ms", "sent", "weights", "stale", "hidden"]
    head, *lines, total = columns([titles, *(_cells(row, shown) for row in (*summary.rows, summary.total))])
    rule = "-" * max(map(len, (head, *lines, total)))
    meanings = "; ".join(f"{_SHORT.get(cause, cause)} = {MEANINGS[cause]}" for cause in shown)
    explained = f"Per cent of the elapsed time; busy and the causes after ideal add up to 100. {meanings}."
    rows = [head, rule, *lines, *([rule, total] if len(lines) > 1 else [])]
    return "\n".join(
        [headline(run, summary), "", *rows, "", *textwrap.wrap(explained, _WIDTH), "", *statements(run, summary)]
    )


def headline(run: RecordedRun, summary: Summary) -> str:
    """Return what ran, and which part of it is shown."""
    first, last = summary.mini_batches
    schedule, replicas = run.meta.schedule, run.meta.num_replicas
    flush = f"lookahead {schedule.lookahead}, no flush" if schedule.pipeline_rule.delay else "a flush per mini-batch"
    return (
        f"{schedule.num_stages} stages{f' x {replicas} replicas' if replicas > 1 else ''},"
        f" {run.ranks[0].micro_batches} micro-batches per mini-batch, {flush}; mini-batches {first} to {last}:"
        f" {summary.seconds:.3f} s"
    )


def _causes(summary: Summary) -> list[str]:
    return [cause for cause in CAUSES if cause not in _RARE or any(row.shares[cause] > 0 for row in summary.rows)]


def _cells(row: Row, shown: list[str]) -> list[str]:
    versions = "-" if row.versions is None else f"W{row.versions[0]}-W{row.versions[1]}"
    return [
        row.name, _percent(row.utilisation), _percent(row.ideal), *(_percent(row.shares[cause]) for cause in shown),
        f"{row.forward_ms:.2f}", f"{row.backward_ms:.2f}", format_bytes(row.bytes_sent), versions,
        "-" if row.staleness is None else f"{row.staleness:.2f}", _percent(row.hidden),
    ]  # fmt: skip


def statements(run: RecordedRun, summary: Summary) -> list[str]:
    """Return what the recording shows, in sentences."""
    lines = []
    if summary.ideal_step:
        lines.append(
            f"Ideal: with each stage's median times and nothing else a mini-batch takes {1e3 * summary.ideal_step:.1f}"
            f" ms; here it took {1e3 * summary.step:.1f} ms, {summary.step / summary.ideal_step:.2f} times as long."
        )
    if (balance := summary.balance) is not None:
        lines.append(
            f"Balance: the busiest stage, stage {balance.busiest}, computes {balance.imbalance:.2f} times the mean of"
            f" the stages; layers per stage: {', '.join(map(str, balance.layers))}."
        )
    lines += _staleness(run, summary)
    return lines + [f"Note: {note}." for note in summary.notes]


def _staleness(run: RecordedRun, summary: Summary) -> list[str]:
    if summary.violations:
        count = len(summary.violations)
        lines = [f"STALENESS VIOLATED {count} times: this run did not train as its schedule prescribes."]
        return lines + [f"  - {problem}" for problem in summary.violations[:5]]
    expected = ", ".join(f"{phi(rank.meta.schedule, rank.micro_batches):.3g}" for rank in run.replicas()[0])
    return [
        "Staleness: every micro-batch ran on the weights that the schedule prescribes; gradients of stages"
        f" {', '.join(str(rank.meta.schedule.stage) for rank in run.replicas()[0])} are {expected} updates old."
    ]


def phi(schedule: Schedule, micro_batches: int) -> float:
    """Return how many updates old the gradients of a stage are."""
    return schedule.stage_rule.staleness(micro_batches)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def format_bytes(count: int) -> str:
    """Return a size that can be read: 1.5 MB is 1 500 000 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
