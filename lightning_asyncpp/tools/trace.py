"""``asyncpp trace RUN``: show how a recorded run spent its time, as a table and as timelines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import BACKGROUND, Activity, Span, SpanKind, Wait
from lightning_asyncpp.strategy_parts.recording import NAMES, PER_MICROBATCH, about, event
from lightning_asyncpp.tools.parsers import trace_parser
from lightning_asyncpp.tools.recorded_run import RankTrace, RecordedRun, read_run
from lightning_asyncpp.tools.trace_summary import Summary, headline, summarise, table

# Later kinds are drawn on top.
_COLORS: dict[SpanKind, str] = {
    Activity.DRAIN: "#98a3b0", Wait.DATA: "#cfe0c0", Activity.EVALUATE: "#bcc7d3", Activity.CHECKPOINT: "#cbb48d",
    Wait.ACTIVATION: "#c3d9f3", Wait.GRADIENT: "#fae0b5", Wait.AGREEMENT: "#edc2d3", Kind.FORWARD: "#4c8fdb",
    Kind.BACKWARD: "#f0a136", Kind.UPDATE: "#b02a5b", Activity.SEND: "#159b86",
}  # fmt: skip
_LANE, _BAR = 30, 22  # heights in pixels
_MICROSECONDS = 1e6


def html(run: RecordedRun, summary: Summary) -> str:
    """Return the timeline and the table of a run as one page."""
    page = resources.files("lightning_asyncpp.tools").joinpath("trace_page.html").read_text(encoding="utf-8")
    legend = "".join(f'<span><i style="background:{color}"></i>{NAMES[kind]}</span>' for kind, color in _COLORS.items())
    parts = {
        "title": escape(headline(run, summary)), "legend": legend, "table": escape(table(run, summary)),
        "names": "".join(f"<div>{rank.meta.name}</div>" for rank in run.ranks), "picture": picture(run),
    }  # fmt: skip
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def picture(run: RecordedRun) -> str:
    """Return the timeline as SVG, with one lane per rank and one unit of width per microsecond."""
    width, height = run.seconds * _MICROSECONDS, _LANE * len(run.ranks)
    bars = [_bar(run, rank, span, lane) for lane, rank in enumerate(run.ranks) for span in _by_depth(rank.spans)]
    box = f'viewBox="0 0 {width:.0f} {height}" height="{height}" preserveAspectRatio="none"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(bars)}</svg>'


def _by_depth(spans: Sequence[Span]) -> list[Span]:
    order = {kind: place for place, kind in enumerate(_COLORS)}
    return sorted((span for span in spans if span.kind not in BACKGROUND), key=lambda span: order[span.kind])


def _bar(run: RecordedRun, rank: RankTrace, span: Span, lane: int) -> str:
    start, end = max(span.start, 0.0), min(span.end, run.seconds)
    mini_batch = rank.mini_batch(span)
    facts = [f"{NAMES[span.kind]} {span.index}", f"{1e3 * (span.end - span.start):.3f} ms", f"mini-batch {mini_batch}"]
    facts += [f"W{span.version}"] if span.version >= 0 else []
    facts += [f"{mini_batch - span.version} updates old"] if span.version >= 0 and span.kind is not Kind.UPDATE else []
    facts += [f"{span.num_bytes} bytes"] if span.num_bytes else []
    microbatch = f' data-k="{rank.meta.replica}-{span.index}"' if span.kind in PER_MICROBATCH else ""
    high = _BAR if span.kind is not Activity.SEND else _BAR // 3
    return (
        f'<rect x="{start * _MICROSECONDS:.1f}" y="{_LANE * lane + (_LANE - _BAR) // 2}" height="{high}"'
        f' width="{(end - start) * _MICROSECONDS:.1f}" fill="{_COLORS[span.kind]}"{microbatch}>'
        f"<title>{rank.meta.name}: {', '.join(facts)}</title></rect>"
    )


def perfetto(run: RecordedRun, summary: Summary) -> str:
    """Return the events of all ranks."""
    lines = [json.dumps(named) for rank in run.ranks for named in about(rank.meta)]
    lines += [
        event(span, rank.meta.process, lambda k, rank=rank: rank.places[k])  # type: ignore[misc]
        for rank in run.ranks
        for span in rank.spans
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


_FORMS: dict[str, Callable[[RecordedRun, Summary], str]] = {
    "html": html,
    "perfetto": perfetto,
    "json": lambda _, summary: json.dumps(summary.as_json(), indent=2) + "\n",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write the requested files."""
    arguments = trace_parser().parse_args(argv)
    files = {name: Path(path) for name in _FORMS if (path := getattr(arguments, name)) is not None}
    run = read_run(Path(arguments.run))
    summary = summarise(run)
    for name, path in files.items():
        path.write_text(_FORMS[name](run, summary), encoding="utf-8")
    print("\n".join([table(run, summary), *(f"{name}: {path}" for name, path in files.items())]))
