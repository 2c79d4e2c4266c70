"""Pictures of timelines: a lane for each stage, runs below each other on one time scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span

COLOURS: dict[object, str] = {Kind.FORWARD: "#4c8fdb", Kind.BACKWARD: "#f0a136", Kind.UPDATE: "#b02a5b"}
_IDLE = "#eceff3"
_CHARACTER = 0.008  # width of a character, as a share of the picture
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "timelines", "font.size": 9})


@dataclass(frozen=True)
class Panel:
    """One run of a pipeline.

    Attributes:
        title: what ran.
        lanes: spans of each stage, the first stage first, on one clock.
        start: when the picture begins on that clock.
        colour: of a span.
        label: what is written into it.
    """

    title: str
    lanes: Sequence[Sequence[Span]]
    start: float = 0.0
    colour: Callable[[Span], str] = lambda span: COLOURS[span.kind]
    label: Callable[[Span], str] = lambda span: ""


def draw_panels(
    path: str,
    title: str,
    panels: Sequence[Panel],
    length: float,
    unit: str,
    factor: float = 1.0,
    legend: Sequence[tuple[str, str]] = (("forward", COLOURS[Kind.FORWARD]), ("backward", COLOURS[Kind.BACKWARD])),
) -> None:
    """Draw runs into a file.

    Args:
        path: of the file; its ending is the format.
        title: of the whole picture.
        panels: the runs.
        length: how much time is drawn, in the unit of the spans.
        unit: name of the time on the axis.
        factor: how many of ``unit`` one unit of the spans is.
        legend: what colours mean.
    """
    heights = [len(panel.lanes) for panel in panels]
    figure = Figure(figsize=(11, 0.25 * sum(heights) + 0.5 * len(panels) + 1.1), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        for stage, spans in enumerate(panel.lanes):
            _draw_lane(axes, panel, stage, spans, length, factor)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xlim(0, length * factor)
        axes.set_ylim(len(panel.lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(panel.lanes)), [f"stage {stage}" for stage in range(len(panel.lanes))])
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
    all_axes[-1].set_xlabel(unit)
    entries = [Patch(color=colour, label=text) for text, colour in (*legend, ("idle", _IDLE))]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def _draw_lane(axes: Any, panel: Panel, stage: int, spans: Sequence[Span], length: float, factor: float) -> None:
    axes.barh(stage, length * factor, color=_IDLE)
    starts, widths, colours, labels = [], [], [], []
    for span in spans:
        start, end = max(span.start - panel.start, 0.0), min(span.end - panel.start, length)
        if end < start or start >= length:
            continue
        if span.kind is Kind.UPDATE:  # takes no time: a line that can be seen
            axes.vlines(start * factor, stage - 0.45, stage + 0.45, color=panel.colour(span), linewidth=2, zorder=3)
            continue
        starts.append(start * factor)
        widths.append((end - start) * factor)
        colours.append(panel.colour(span))
        label = panel.label(span)
        labels.append(label if len(label) * _CHARACTER <= (end - start) / length else "")
    bars = axes.barh([stage] * len(starts), widths, left=starts, color=colours, edgecolor="white", linewidth=0.5)
    if any(labels):
        axes.bar_label(bars, labels, label_type="center", fontsize=8)
