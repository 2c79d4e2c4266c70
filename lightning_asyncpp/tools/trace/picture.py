"""The timeline and the shares of the time as a picture, for pages and papers; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Span, Wait
from lightning_asyncpp.tools.trace.perfetto import NAMES
from lightning_asyncpp.tools.trace.run import RecordedRun, TraceError
from lightning_asyncpp.tools.trace.summary import Summary
from lightning_asyncpp.tools.trace.table import headline

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

NEEDS_MATPLOTLIB = "--png needs matplotlib: pip install 'lightning-asyncpp[plots]'"


def write_png(run: RecordedRun, summary: Summary, path: Path) -> None:
    """Draw a run.

    Raises:
        TraceError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TraceError(NEEDS_MATPLOTLIB) from None
    lanes = len(run.ranks)
    figure = Figure(figsize=(14, 2.6 + 0.3 * lanes + 0.24 * lanes), layout="constrained", dpi=150)
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
