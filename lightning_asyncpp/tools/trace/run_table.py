"""The summary as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lightning_asyncpp.tools.trace.causes import CAUSES
from lightning_asyncpp.tools.trace.recorded_run import RecordedRun
from lightning_asyncpp.tools.trace.run_summary import Row, Summary

MEANINGS = {
    "warm-up": "waiting while the pipeline fills",
    "drain": "waiting while it is emptied",
    "activation": "waiting for the stage before",
    "gradient": "waiting for the stage after",
    "send": "handing over messages",
    "agreement": "waiting for the other ranks' part of an update",
    "update": "optimizer steps",
    "data": "waiting for the loader, and what the loop does between batches",
    "evaluate": "validation",
    "checkpoint": "saving",
    "framework": "the rest",
}
_SHORT = {"activation": "activ.", "agreement": "agree", "framework": "rest", "checkpoint": "save", "evaluate": "val."}
_RARE = ("evaluate", "checkpoint")
_WIDTH = 120


def table(run: RecordedRun, summary: Summary) -> str:
    """Where the time of every stage went, in per cent of the elapsed time, and what else the recording tells."""
    lines = [headline(run, summary), ""]
    lines += _columns([_titles(summary), *[_cells(row, summary) for row in (*summary.rows, summary.total)]])
    shown = "; ".join(f"{_SHORT.get(c, c)} = {MEANINGS[c]}" for c in _causes(summary))
    explained = f"Per cent of the elapsed time; busy and the causes after ideal add up to 100. {shown}."
    lines += ["", *textwrap.wrap(explained, _WIDTH), "", *statements(run, summary)]
    return "\n".join(lines)


def headline(run: RecordedRun, summary: Summary) -> str:
    """What ran, and which part of it is shown."""
    first, last = summary.mini_batches
    meta = run.meta
    replicas = f" x {meta.num_replicas} replicas" if meta.num_replicas > 1 else ""
    delayed = any(rank.meta.delay for rank in run.ranks)
    start = f" after the first {meta.synchronous_start}" if first < meta.synchronous_start else ""
    schedule = f"lookahead {meta.lookahead}, no flush{start}" if delayed else "a flush per mini-batch"
    return (
        f"{meta.num_stages} stages{replicas}, {run.ranks[0].micro_batches} micro-batches per mini-batch, {schedule};"
        f" mini-batches {first} to {last}: {summary.seconds:.3f} s"
    )


def _causes(summary: Summary) -> list[str]:
    return [c for c in CAUSES if c not in _RARE or any(row.shares[c] > 0 for row in summary.rows)]


def _titles(summary: Summary) -> list[str]:
    causes = [_SHORT.get(c, c) for c in _causes(summary)]
    return ["", "busy", "ideal", *causes, "F ms", "B ms", "sent", "weights", "stale", "hidden"]


def _cells(row: Row, summary: Summary) -> list[str]:
    versions = "-" if row.versions is None else f"W{row.versions[0]}-W{row.versions[1]}"
    return [
        row.name, _percent(row.utilisation), _percent(row.ideal), *[_percent(row.shares[c]) for c in _causes(summary)],
        f"{row.forward_ms:.2f}", f"{row.backward_ms:.2f}", format_bytes(row.bytes_sent), versions,
        row.staleness if row.versions else "-", _percent(row.hidden),
    ]  # fmt: skip


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    rule = "-" * max(len(line) for line in text)
    return [text[0], rule, *text[1:-1], *([rule] if len(text) > 2 else []), text[-1]]


def statements(run: RecordedRun, summary: Summary) -> list[str]:
    """What the recording says in sentences."""
    lines = []
    if summary.ideal_seconds:
        ratio = summary.seconds / summary.ideal_seconds
        lines.append(
            f"Ideal: the same actions with each stage's median times, without messages, updates and framework, take"
            f" {summary.ideal_seconds:.3f} s; this run took {ratio:.2f} times as long."
        )
    if summary.balance is not None:
        lines.append(summary.balance.sentence())
    lines.append(_staleness(run, summary))
    lines += [f"  - {problem}" for problem in summary.violations]
    if summary.total.hidden is None:
        why = "waits for agreements were not recorded" if run.is_whole else "recordings of ranks are missing"
        lines.append(f"Updates: what of them is hidden is not known, {why}.")
    else:
        lines.append(
            f"Updates: {summary.total.hidden:.1%} of the time of reductions and agreements passed without a stage that"
            " waited for it."
        )
    return lines + [f"Note: {note}." for note in summary.notes]


def _staleness(run: RecordedRun, summary: Summary) -> str:
    if summary.violated:
        return f"STALENESS VIOLATED {summary.violated} times: this run did not train as its schedule promises."
    if summary.total.versions is None:
        return "Staleness: weight versions were not recorded."
    (first, last), start = summary.mini_batches, run.meta.synchronous_start
    # Recordings before there was a number of micro-batches that are held back have a delay of 0 there.
    delays = sorted({0 if rank.meta.held == 0 else rank.meta.delay for rank in run.ranks})
    rule = "W_t" if delays == [0] or last < start else f"W_max(t-1, {start})"
    if any(rank.meta.held for rank in run.ranks) and last >= start:
        rule += _held(run)
    rule += f", the synchronous ones before {start} on W_t" if first < start <= last else ""
    where = "" if run.is_whole else " on the ranks that were recorded"
    return f"Staleness: as promised, mini-batch t ran on {rule}{where}."


def _held(run: RecordedRun) -> str:
    """How many micro-batches of a mini-batch the older weights were for."""
    counts = {rank.meta.stage: (rank.meta.held, rank.micro_batches) for rank in run.ranks}
    held = [str(count if held is None else min(held, count)) for _, (held, count) in sorted(counts.items())]
    stages = ", ".join(map(str, sorted(counts)))
    return f" with the first {', '.join(held)} of its micro-batches on stages {stages}, and with the others on W_t"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def format_bytes(count: int) -> str:
    """A size that can be read: 1.5 MB is 1 500 000 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
