"""The plots of an ablation, as SVG: gaps, loss curves, loss against lr, gap against momentum and against depth.

matplotlib is imported here and nowhere else, without pyplot: no display, no global state. The same data give the same
bytes (with the same matplotlib), so a picture under version control changes only when its data do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_asyncpp.tools.ablation.summary import UNCORRECTED, Ablation, Group, Result, Spread, band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[int, float]]]
Point = tuple[float, Spread]
Series = Mapping["Line", Sequence[Point]]
Gaps = Sequence[tuple["Line", Spread]]
Band = list[tuple[int, float, float, float]]

# Okabe and Ito's palette, told apart by colour-blind readers too; markers say the same once more.
_SYNC, _ASYNC = ("#222222", "o"), ("#D55E00", "s")
_CORRECTED = (("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"))
_MUTED, _GRID = "#5c6875", "#e3e7ec"
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "asyncpp", "svg.fonttype": "none", "font.size": 10,
    "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.edgecolor": "#9aa5b1", "axes.labelcolor": "#222222", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": _GRID, "xtick.color": _MUTED, "ytick.color": _MUTED,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5,
    "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
_RING: dict[str, Any] = {"ls": "", "marker": "o", "ms": 12, "mfc": "none", "mew": 1.5}
_CROSS: dict[str, Any] = {"ls": "", "marker": "x", "ms": 7, "mew": 2}
_VARIABLE, _CONSTANT, _ANY_DIVERGED = "PipeDream: delay by stage", "constant: one update", "a seed diverged"
_EXTRA: dict[str, dict[str, Any]] = {
    "chosen": _RING, "diverged": _CROSS, _ANY_DIVERGED: _CROSS, _VARIABLE: {"ls": "-"}, _CONSTANT: {"ls": "--"},
}  # fmt: skip
_GAP_LABEL = "gap to sync (own scale)"  # a robust optimizer's gap could not be seen on a shared one
_COLUMNS, _PANEL = 4, (3.1, 2.7)  # panels side by side at most; width and height of one in inches
_SHOWN_FROM = 0.25  # share of the steps from which on curves decide the range of the axis
_SEARCH_CEILING = 1.25  # end of the axis over the worst chosen loss


@dataclass(frozen=True, order=True)
class Line:
    """How a state of the comparison is drawn everywhere, and its place in the legend."""

    place: int
    label: str
    colour: str
    marker: str


def write_plots(folder: Path, ablation: Ablation, curves: Curves) -> list[str]:
    """Write every plot whose data exist and remove those whose data are gone.

    Args:
        folder: where to.
        ablation: results.
        curves: validation loss by cell, as (step, loss).

    Returns:
        The names of the files written.
    """
    from matplotlib import style

    figures = {
        "gaps": lambda: draw_overview(ablation),
        "curves": lambda: draw_curves(ablation, curves),
        "lr": lambda: draw_learning_rates(ablation),
        "momentum": lambda: draw_momentum(ablation),
        "depth": lambda: draw_depth(ablation),
    }
    written = []
    with style.context(["default", _STYLE]):
        for name, draw in figures.items():
            file, figure = folder / f"{name}.svg", draw()
            if figure is None:
                file.unlink(missing_ok=True)
                continue
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            written.append(file.name)
    return written


def draw_overview(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay of every optimizer and correction, with its standard deviation over seeds."""
    shown = {group: gaps for group in ablation.groups if (gaps := _gaps(ablation, group))}
    if not any(gap.values for gaps in shown.values() for _, gap in gaps):
        return None
    figure, (axes,) = _panels(["Loss after training less that without delay"], "", "gap to sync")
    figure.set_size_inches(7.5, 1.3 + 0.36 * len(shown))
    for place, gaps in enumerate(shown.values()):
        _draw_row(axes, place, gaps)
    axes.axvline(0, color=_SYNC[0], lw=1.2, zorder=1)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(shown)), [group.label for group in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _legend(figure, [line for gaps in shown.values() for line, _ in gaps])
    return figure


def draw_curves(ablation: Ablation, curves: Curves) -> Figure | None:
    """Validation loss against step at each row's learning rate: mean over seeds, band from minimum to maximum."""
    shown = {group: _with_band(ablation, group, curves) for group in ablation.groups}
    shown = {group: entries for group, entries in shown.items() if entries}
    if not shown:
        return None
    figure, panels = _panels([group.label for group in shown], "validation loss", "step")
    for axes, entries in zip(panels, shown.values()):
        for line, points in ((line, points) for line, _, points in entries if points):
            steps, means, lows, highs = zip(*points)
            axes.plot(steps, means, color=line.colour)
            axes.fill_between(steps, lows, highs, color=line.colour, alpha=0.18, linewidth=0)
        _print_losses(axes, [(line, result) for line, result, _ in entries])
        axes.set_xlim(left=0)
    every = [points for entries in shown.values() for _, _, points in entries if points]
    panels[0].set_ylim(*_curve_range(every, max(map(len, shown.values()))))
    _legend(figure, [line for entries in shown.values() for line, _, _ in entries], marker=False)
    return figure


def draw_learning_rates(ablation: Ablation) -> Figure | None:
    """Loss of every learning rate on the search seed; the chosen one is ringed, diverged ones are crosses at the top.

    The axis ends above the worst chosen loss: lines of learning rates that are far worse leave it.
    """
    shown = {group: _lines(ablation, group) for group in ablation.groups}
    shown = {group: entries for group, entries in shown.items() if any(result.searched for _, result in entries)}
    tried = [loss for entries in shown.values() for _, result in entries for loss in result.search.values()]
    losses = [loss for loss in tried if loss is not None]
    if not losses:
        return None
    figure, panels = _panels([group.label for group in shown], "validation loss", "learning rate")
    worst = max(result.best or 0.0 for entries in shown.values() for _, result in entries)
    low, high = min(losses), min(max(losses), _SEARCH_CEILING * worst)
    margin = 0.07 * (high - low or 1.0)
    panels[0].set_ylim(low - margin, high + 2 * margin)
    for axes, entries in zip(panels, shown.values()):
        axes.set_xscale("log")
        axes.margins(x=0.12)
        lrs = sorted({lr for _, result in entries for lr in result.search})
        axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs], fontsize=8.5)
        axes.minorticks_off()
        for place, (line, result) in enumerate(entries):
            _draw_search(figure, axes, line, result, high + margin, 8 * (place - (len(entries) - 1) / 2))
    more = ["chosen", *(["diverged"] if None in tried else [])]
    _legend(figure, [line for entries in shown.values() for line, _ in entries], more=more)
    return figure


def draw_momentum(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay at the same momentum, each at its own best learning rate, by momentum."""
    shown: dict[str, dict[Line, list[Point]]] = {}
    for group in ablation.groups:
        for line, gap in _gaps(ablation, group) if group.momentum is not None else []:
            shown.setdefault(group.optimizer, {}).setdefault(line, []).append((group.momentum or 0.0, gap))
    return _gap_figure(shown, "momentum", {})


def draw_depth(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay by number of stages: PipeDream's variable delay, and a constant one of one update.

    None unless PipeDream's delay was run with at least two numbers of stages.
    """
    if len({row.stages for row in ablation.results if row.kind == "pipedream"} - {None}) < 2:
        return None
    shown = {group: series for group in ablation.groups if (series := _by_depth(ablation, group))}
    levels = {group.label: _gaps(ablation, group) for group in shown}
    return _gap_figure({group.label: series for group, series in shown.items()}, "stages", levels)


def _gap_figure(shown: Mapping[str, Series], x_label: str, levels: Mapping[str, Gaps]) -> Figure | None:
    """A panel per title with gaps against ``x_label``, and ``levels`` that hold for all of it."""
    gaps = [gap for series in shown.values() for points in series.values() for _, gap in points]
    if not any(gap.values for gap in gaps):
        return None
    figure, panels = _panels(list(shown), _GAP_LABEL, x_label, shared=False)
    lines = [line for series in shown.values() for line in series]
    for axes, (title, series) in zip(panels, shown.items()):
        _draw_gaps(axes, series)
        for line, gap in levels.get(title, ()):
            _draw_level(axes, line, gap)
            lines.append(line)
    more = [_VARIABLE, _CONSTANT] if levels else []
    _legend(figure, lines, more=[*more, *([_ANY_DIVERGED] if any(gap.diverged for gap in gaps) else [])])
    return figure


def _lines(ablation: Ablation, group: Group) -> list[tuple[Line, Result]]:
    """What there is of: no delay, a delay of one update, and that with each correction."""
    found = [(Line(0, "sync", *_SYNC), ablation.sync(group))]
    for correction in (UNCORRECTED, *ablation.corrections):
        found.append((_delayed_line(ablation, correction), ablation.constant(group, "1", correction)))
    return [(line, result) for line, result in found if result is not None]


def _delayed_line(ablation: Ablation, correction: str) -> Line:
    if correction == UNCORRECTED:
        return Line(1, "async", *_ASYNC)
    place = ablation.corrections.index(correction)
    return Line(2 + place, f"async + {correction}", *_CORRECTED[place % len(_CORRECTED)])


def _with_band(ablation: Ablation, group: Group, curves: Curves) -> list[tuple[Line, Result, Band]]:
    """The lines of a panel with the band of their finished runs, which is empty if all diverged."""
    found = []
    for line, result in _lines(ablation, group):
        points = band([curves[run.cell] for run in result.runs if run.loss is not None and run.cell in curves])
        if points or not result.loss.values:
            found.append((line, result, points))
    return found if any(points for _, _, points in found) else []


def _gaps(ablation: Ablation, group: Group) -> list[tuple[Line, Spread]]:
    """Gap to the run without delay of each delayed line, where a seed has both; without a value if one diverged."""
    gaps = [(line, ablation.gap(result.row)) for line, result in _lines(ablation, group) if result.row.kind != "0"]
    return [(line, gap) for line, gap in gaps if gap is not None]


def _by_depth(ablation: Ablation, group: Group) -> dict[Line, list[Point]]:
    series: dict[Line, list[Point]] = {}
    for row in ablation.results:
        if row.group == group and row.kind == "pipedream" and row.stages is not None and (gap := ablation.gap(row)):
            series.setdefault(_delayed_line(ablation, row.correction), []).append((row.stages, gap))
    return series


def _panels(titles: Sequence[str], y_label: str, x_label: str, shared: bool = True) -> tuple[Figure, list[Axes]]:
    """Small multiples, by default with one range of the vertical axis, so that heights compare across panels."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(titles) / _COLUMNS)
    columns = math.ceil(len(titles) / rows)
    figure = Figure(figsize=(_PANEL[0] * columns + 0.4, _PANEL[1] * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=shared, squeeze=False).ravel().tolist()
    for place, (axes, title) in enumerate(zip(grid, titles)):
        axes.set_title(title, loc="left")
        axes.set(xlabel=x_label, ylabel="" if place % columns else y_label)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    return figure, grid[: len(titles)]


def _legend(figure: Figure, lines: Sequence[Line], marker: bool = True, more: Sequence[str] = ()) -> None:
    """One legend above all panels: the lines, and what else the drawing uses."""
    from matplotlib.lines import Line2D

    marked = [(line, line.marker if marker else "") for line in sorted(set(lines))]
    handles = [Line2D([], [], color=line.colour, marker=mark, label=line.label) for line, mark in marked]
    handles += [Line2D([], [], color=_MUTED, label=label, **_EXTRA[label]) for label in more]
    columns = min(len(handles), 2 * round(figure.get_figwidth() / _PANEL[0]))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def _draw_row(axes: Axes, place: int, gaps: Gaps) -> None:
    """A row of the overview: its gaps, and at the right which seeds diverged."""
    lost = [f"{line.label}: {_diverged(gap)}" for line, gap in gaps if gap.diverged]
    at_right: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    axes.text(1, place - 0.14, ", ".join(lost), color=_MUTED, fontsize=8.5, **at_right)
    known = [(line, gap.mean, gap.std) for line, gap in gaps if gap.mean is not None]
    ends = [0.0, *(mean for _, mean, _ in known)]
    axes.plot(ends, [place] * len(ends), color=_GRID, lw=5, solid_capstyle="round", zorder=1)
    for line, mean, std in known:
        axes.errorbar(mean, place, xerr=std, color=line.colour, marker=line.marker, ms=7, capsize=3, ls="")


def _print_losses(axes: Axes, entries: Sequence[tuple[Line, Result]]) -> None:
    """Final losses in the upper right corner, in the colours of the curves."""
    for position, (line, result) in enumerate(entries):
        loss = result.loss
        mean = "" if loss.mean is None else f" {loss.mean:.3f}"
        lost = f" ({_diverged(loss)})" if loss.diverged else ""
        axes.annotate(
            f"{line.label}{mean}{lost}", (1, 1), (-2, -4 - 13 * position), xycoords="axes fraction",
            textcoords="offset points", ha="right", va="top", color=line.colour, fontsize=9,
        )  # fmt: skip


def _diverged(spread: Spread) -> str:
    return f"{spread.diverged} of {spread.diverged + len(spread.values)} diverged" if spread.values else "diverged"


def _draw_search(figure: Figure, axes: Axes, line: Line, result: Result, ceiling: float, aside: float) -> None:
    """A row's search; crosses stand ``aside`` points beside their learning rate, so that none hides another."""
    from matplotlib.transforms import ScaledTranslation

    finished = [(lr, loss) for lr, loss in result.search.items() if loss is not None]
    diverged = [lr for lr, loss in result.search.items() if loss is None]
    if finished:
        axes.plot(*zip(*finished), color=line.colour, marker=line.marker)
    if diverged:
        shift = axes.transData + ScaledTranslation(aside / 72, 0, figure.dpi_scale_trans)
        axes.plot(diverged, [ceiling] * len(diverged), color=line.colour, transform=shift, **_CROSS)
    if result.lr is not None and result.best is not None:
        axes.plot(result.lr, result.best, color=line.colour, **_RING)


def _draw_gaps(axes: Axes, series: Series) -> None:
    """Gaps at evenly spaced positions, with their standard deviation over seeds; a cross at the top if any diverged."""
    places = sorted({place for points in series.values() for place, _ in points})
    for rank, (line, points) in enumerate(series.items()):
        aside = 0.06 * (rank - (len(series) - 1) / 2)
        at = [(places.index(place) + aside, gap) for place, gap in sorted(points, key=lambda point: point[0])]
        known = [(x, gap.mean, gap.std or 0.0) for x, gap in at if gap.mean is not None]
        if known:
            x, means, errors = zip(*known)
            axes.errorbar(x, means, errors, color=line.colour, marker=line.marker, capsize=3, elinewidth=1)
        lost = [x for x, gap in at if gap.diverged]
        axes.plot(
            lost, [0.97 - 0.07 * rank] * len(lost), color=line.colour, transform=axes.get_xaxis_transform(), **_CROSS
        )
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    axes.set_xlim(-0.4, len(places) - 0.6)
    axes.axhline(0, color=_SYNC[0], lw=1, zorder=1)


def _draw_level(axes: Axes, line: Line, gap: Spread) -> None:
    """A gap that does not depend on the depth: a dashed line, its standard deviation a band."""
    if gap.mean is None:
        return
    axes.axhline(gap.mean, color=line.colour, ls="--", lw=1.5)
    if gap.std:
        axes.axhspan(gap.mean - gap.std, gap.mean + gap.std, color=line.colour, alpha=0.12, lw=0)


def _curve_range(bands: Sequence[Band], printed: int) -> tuple[float, float]:
    """Range of the axis: the first steps, where all fall alike, do not squeeze the rest.

    Above the second half of the curves there is room for ``printed`` lines of text.
    """
    low = min(lowest for points in bands for _, _, lowest, _ in points)
    high, late = (
        max(mean for points in bands for step, mean, _, _ in points if step >= share * points[-1][0])
        for share in (_SHOWN_FROM, 0.45)
    )
    room = min(0.7, (printed + 1) * 13 / 140)  # a panel is about 140 points high, a line of text 13
    high = max(high, low + (late - low) / (1 - room))
    margin = 0.05 * (high - low or 1.0)
    return low - margin, high + margin
