"""A recorded run to look into: a page for any browser, events for ui.perfetto.dev, and a picture (needs matplotlib)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_asyncpp.core.recording.trace import Beside, Span, Wait
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.optional_packages import needed, optional_package
from lightning_asyncpp.tools.trace.recorded_run import PER_MICRO_BATCH, RankTrace, RecordedRun, TraceError
from lightning_asyncpp.tools.trace.run_summary import Summary
from lightning_asyncpp.tools.trace.run_table import headline, statements

UNIT = 1e-4
"""Milliseconds that one step of a time in the page is worth."""
# In the order of KINDS in page/model.js.
_KINDS: tuple[Kind | Wait | Beside, ...] = (
    Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Wait.ACTIVATION, Wait.GRADIENT, Wait.AGREEMENT, Wait.DATA, Beside.SEND,
    Beside.REDUCE, Beside.DRAIN, Beside.EVALUATE, Beside.CHECKPOINT,
)  # fmt: skip
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_SCRIPTS = ("model.js", "draw.js", "overview.js", "report.js", "main.js")
Event = dict[str, Any]
NEEDS_MATPLOTLIB = needed("--png", ["matplotlib"])
_THREADS = {1: "work", 2: "waits", 3: "messages", 4: "reductions", 5: "drains and pauses"}
_THREAD_OF: dict[Kind | Wait | Beside, int] = {
    **dict.fromkeys(Kind, 1), **dict.fromkeys(Wait, 2), Beside.SEND: 3, Beside.REDUCE: 4, Beside.DRAIN: 5,
    Beside.EVALUATE: 5, Beside.CHECKPOINT: 5,
}  # fmt: skip
NAMES: dict[Kind | Wait | Beside, str] = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Wait.ACTIVATION: "wait for activation",
    Wait.GRADIENT: "wait for gradient", Wait.AGREEMENT: "wait for agreement", Wait.DATA: "wait for data",
    Beside.SEND: "send", Beside.REDUCE: "reduce", Beside.DRAIN: "drain", Beside.EVALUATE: "validation",
    Beside.CHECKPOINT: "checkpoint",
}  # fmt: skip
_COLOURS: dict[Kind | Wait | Beside, str] = {
    Wait.ACTIVATION: "#c3d9f3", Wait.GRADIENT: "#fae0b5", Wait.AGREEMENT: "#edc2d3", Wait.DATA: "#cfe0c0",
    Beside.EVALUATE: "#bcc7d3", Beside.CHECKPOINT: "#cbb48d", Kind.FORWARD: "#4c8fdb", Kind.BACKWARD: "#f0a136",
    Kind.UPDATE: "#b02a5b", Beside.SEND: "#159b86",
}  # fmt: skip
_CAUSES = {
    "forward": "#4c8fdb", "backward": "#f0a136", "warm-up": "#d4dae1", "drain": "#98a3b0", "activation": "#c3d9f3",
    "gradient": "#fae0b5", "send": "#159b86", "agreement": "#edc2d3", "update": "#b02a5b", "data": "#cfe0c0",
    "evaluate": "#bcc7d3", "checkpoint": "#cbb48d", "framework": "#e8ebef",
}  # fmt: skip
_INK, _DIM, _LANE = "#1f2933", "#5c6875", "#eceff3"


def write_html(run: RecordedRun, summary: Summary, path: Path) -> None:
    """Write the timeline and the table of a run as one page."""
    path.write_text(page(run, summary), encoding="utf-8")


def page(run: RecordedRun, summary: Summary) -> str:
    """The page: markup, style, script and data in one document."""
    script = "\n".join(_part(name) for name in _SCRIPTS)
    data = json.dumps(page_data(run, summary), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = _part("page.html")
    title = f"asyncpp trace: {run.meta.num_stages} stages" + (
        f" x {run.meta.num_replicas} replicas" if run.meta.num_replicas > 1 else ""
    )
    parts = {"title": escape(title), "style": _part("style.css"), "data": data, "script": script}
    # In one go: what is put in may hold such a mark itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], text)


def page_data(run: RecordedRun, summary: Summary) -> dict[str, Any]:
    """What the page shows, in columns; times count from the start of the time that is looked at."""
    rows = {row.name: row for row in summary.rows}
    return {
        "unit": UNIT,
        "seconds": run.seconds,
        "facts": headline(run, summary),
        "lanes": [_lane(run, rank) | {"utilisation": rows[rank.name].utilisation} for rank in run.ranks],
        "summary": summary.as_json(),
        "statements": statements(run, summary),
    }


def _lane(run: RecordedRun, rank: RankTrace) -> dict[str, Any]:
    """A rank's spans; starts are differences, which are short."""
    starts = [round((span.start - run.start) * 1e3 / UNIT) for span in rank.spans]
    ends = [round((span.end - run.start) * 1e3 / UNIT) for span in rank.spans]
    return {
        "name": rank.name,
        "replica": rank.meta.replica,
        "starts": [now - before for before, now in zip([0, *starts], starts)],
        "lengths": [end - start for start, end in zip(starts, ends)],
        "kinds": [_CODES[span.kind] for span in rank.spans],
        "indices": [span.index for span in rank.spans],
        "batches": [rank.mini_batch(span) for span in rank.spans],
        "versions": [span.version for span in rank.spans],
        "bytes": [span.num_bytes for span in rank.spans],
    }


def _part(name: str) -> str:
    return resources.files("lightning_asyncpp.tools.trace").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def write_perfetto(run: RecordedRun, summary: Summary, path: Path) -> None:
    """Write a recorded run: a process per stage, arrows from each forward and backward to the neighbour's."""
    content = {"displayTimeUnit": "ms", "traceEvents": list(events(run))}
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def events(run: RecordedRun) -> Iterator[Event]:
    """All events of a run; times are in microseconds."""
    for rank in run.ranks:
        yield from _names(rank)
        yield from (_slice(rank, span) for span in rank.spans)
        yield from _bytes_sent(rank)
    for stages in run.replicas():
        yield from _arrows(stages)


def process_of(rank: RankTrace) -> int:
    """Number of the process that stands for a stage."""
    return rank.meta.replica * rank.meta.num_stages + rank.meta.stage + 1


def _names(rank: RankTrace) -> Iterator[Event]:
    process = process_of(rank)
    name = f"{rank.name} (rank {rank.meta.rank}, {rank.meta.host})"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for thread, thread_name in _THREADS.items():
        about = {"ph": "M", "pid": process, "tid": thread}
        yield {**about, "name": "thread_name", "args": {"name": thread_name}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(rank: RankTrace, span: Span) -> Event:
    mini_batch = rank.mini_batch(span)
    details: dict[str, Any] = {"mini_batch": mini_batch}
    if span.kind in PER_MICRO_BATCH:
        details["micro_batch"] = span.index
    if span.version >= 0:
        details["weights"] = f"W{span.version}"
        if span.kind is not Kind.UPDATE:
            details["staleness"] = mini_batch - span.version
    if span.num_bytes:
        details["bytes"] = span.num_bytes
    return {
        "ph": "X", "name": f"{NAMES[span.kind]} {span.index}", "cat": span.kind.value, "pid": process_of(rank),
        "tid": _THREAD_OF[span.kind], "ts": _us(span.start), "dur": round(_us(span.end) - _us(span.start), 3),
        "args": details,
    }  # fmt: skip


def _bytes_sent(rank: RankTrace) -> Iterator[Event]:
    total = 0
    for span in rank.spans:
        if span.kind is Beside.SEND:
            total += span.num_bytes
            yield {
                "ph": "C", "name": "bytes sent", "pid": process_of(rank), "ts": _us(span.end), "args": {"bytes": total},
            }  # fmt: skip


def _arrows(stages: Sequence[RankTrace]) -> Iterator[Event]:
    works = [{(s.kind, s.index): s for s in stage.spans if isinstance(s.kind, Kind)} for stage in stages]
    number = stages[0].meta.replica << 40
    for kind, name, step in ((Kind.FORWARD, "activation", 1), (Kind.BACKWARD, "gradient", -1)):
        for place, stage in enumerate(stages):
            if not 0 <= place + step < len(stages) or stages[place + step].meta.stage != stage.meta.stage + step:
                continue
            for key, span in works[place].items():
                arrived = works[place + step].get(key)
                if key[0] is kind and arrived is not None:
                    number += 1
                    about = {"name": name, "cat": "message", "id": number, "tid": 1}
                    # Inside of the slice that it starts from: at its very end it would belong to the next one.
                    leaves = span.start + 0.999 * (span.end - span.start)
                    yield {**about, "ph": "s", "pid": process_of(stage), "ts": _us(leaves)}
                    yield {
                        **about, "ph": "f", "bp": "e", "pid": process_of(stages[place + step]),
                        "ts": _us(arrived.start),
                    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def write_png(run: RecordedRun, summary: Summary, path: Path) -> None:
    """Draw a run.

    Raises:
        TraceError: matplotlib is not installed.
    """
    try:
        figures = optional_package("matplotlib.figure", "--png")
    except ImportError as error:
        raise TraceError(str(error)) from None
    lanes = len(run.ranks)
    figure = figures.Figure(figsize=(14, 2.6 + 0.3 * lanes + 0.24 * lanes), layout="constrained", dpi=150)
    timeline, shares = figure.subplots(2, 1, height_ratios=[0.3 * lanes + 0.8, 0.24 * lanes + 0.8])
    figure.suptitle(headline(run, summary), fontsize=11, color=_INK, ha="left", x=0.01)
    _draw_timeline(timeline, run)
    _draw_shares(shares, summary)
    figure.savefig(path)


def _draw_timeline(axes: Any, run: RecordedRun) -> None:
    for kind, colour in _COLOURS.items():
        drawn = False
        for place, rank in enumerate(run.ranks):
            rows = _bars(run, rank.spans, kind)
            if rows:
                height = 0.18 if kind is Beside.SEND else 0.8
                bottom = place - 0.4
                label = None if drawn else NAMES[kind]
                axes.broken_barh(rows, (bottom, height), facecolors=colour, label=label, linewidth=0)
                drawn = True
    _dress(axes, [rank.name for rank in run.ranks])
    axes.set_xlim(run.start * 1e3, run.end * 1e3)
    axes.set_xlabel("ms", color=_DIM)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=4.4, ncols=10, fontsize=8, frameon=False)


def _bars(run: RecordedRun, spans: Sequence[Span], kind: Kind | Wait | Beside) -> list[tuple[float, float]]:
    least = run.seconds / 4000 if kind is Kind.UPDATE else 0.0  # a moment that would not be seen
    return [(s.start * 1e3, max(s.end - s.start, least) * 1e3) for s in spans if s.kind is kind and s.end > s.start]


def _draw_shares(axes: Any, summary: Summary) -> None:
    rows = [*summary.rows, summary.total]
    left = [0.0] * len(rows)
    for cause, colour in _CAUSES.items():
        widths = [100 * row.shares[cause] for row in rows]
        if max(widths) >= 0.05:
            axes.barh(range(len(rows)), widths, left=left, height=0.72, color=colour, label=cause)
            left = [start + width for start, width in zip(left, widths)]
    for place, row in enumerate(rows):
        axes.text(1, place, f"{100 * row.utilisation:.1f} % busy", va="center", fontsize=8, color="white")
    _dress(axes, [row.name for row in rows])
    axes.set_xlim(0, 100)
    axes.set_xlabel("per cent of the elapsed time", color=_DIM)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=4.4, ncols=13, fontsize=8, frameon=False)


def _dress(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8, color=_INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_facecolor(_LANE)
    axes.tick_params(colors=_DIM, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
