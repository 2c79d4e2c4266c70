"""The plots of an ablation, as SVG: gaps, loss curves, loss and gap against lr, gap against momentum and depth.

The same data give the same bytes (with the same matplotlib), so a picture under version control changes only when its
data do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_asyncpp.tools.ablation.grid import UNCORRECTED, Group, Row, further, named
from lightning_asyncpp.tools.ablation.report.drawing import (
    ANY_DIVERGED,
    CONSTANT,
    FRESH,
    STYLE,
    SYNC,
    VARIABLE,
    Gaps,
    Line,
    Point,
    Series,
    draw_forest,
    draw_gaps,
    draw_level,
    draw_row,
    draw_search,
    legend,
    panels,
    print_losses,
)
from lightning_asyncpp.tools.ablation.report.lengths import length_of
from lightning_asyncpp.tools.ablation.report.summary import Ablation, Result, Spread, band
from lightning_asyncpp.tools.ablation.report.table_cells import decimals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[int, float]]]
Band = list[tuple[int, float, float, float]]
_GAP_LABEL = "gap to sync (own scale)"  # a robust optimizer's gap could not be seen on a shared one
_BY_STAGE = {"pipedream": VARIABLE, "fresh_last_stage": FRESH}
_MOST_IN_ONE_ROW = 3  # corrections of an optimizer that the overview shows in one row
_SHOWN_FROM = 0.25  # share of the steps from which on curves decide the range of the axis
_SEARCH_REACH = 0.25  # from the worst chosen loss to the end of the axis, as a part of that loss


def lines_of(ablation: Ablation, group: Group) -> list[tuple[Line, Result]]:
    """What there is of: no delay, a delay of one update, and that with each correction."""
    found = [(Line(0, named("sync", ablation.no_delay)), ablation.sync(group))]
    for correction in (UNCORRECTED, *ablation.corrections):
        line = delayed_line(ablation, correction, named("async", ablation.one_update))
        found.append((line, ablation.delayed(group, correction)))
    return [(line, result) for line, result in found if result is not None]


def delayed_line(ablation: Ablation, correction: str, name: str = "async", rank: int = 0) -> Line:
    """The line of a correction, or of none, under a delay.

    Args:
        ablation: whose corrections share the looks.
        correction: its name.
        name: of the delay.
        rank: of the delay's further settings, where several are drawn together.
    """
    # Error Feedback looks the same in every report.
    corrections = [UNCORRECTED, *sorted(ablation.corrections, key=lambda other: other != "EF")]
    place = 1 + rank * len(corrections) + corrections.index(correction)
    return Line(place, name if correction == UNCORRECTED else f"{name} + {correction}")


def gaps_by_learning_rate(
    without_delay: Mapping[float, float | None], delayed: Mapping[float, float | None]
) -> list[Point]:
    """Gap at every learning rate at which both were tried and the run without delay finished."""
    points = []
    for lr, reference in sorted(without_delay.items()):
        if lr in delayed and reference is not None:
            loss = delayed[lr]
            points.append((lr, Spread({}, diverged=1) if loss is None else Spread({0: loss - reference})))
    return points


def with_band(ablation: Ablation, group: Group, curves: Curves) -> list[tuple[Line, Result, Band]]:
    """The lines of a panel with the band of their finished runs, which is empty if all diverged."""
    found = []
    for line, result in lines_of(ablation, group):
        points = band([curves[run.cell] for run in result.runs if run.loss is not None and run.cell in curves])
        if points or not result.loss.values:
            found.append((line, result, points))
    return found if any(points for _, _, points in found) else []


def gaps_to_sync(ablation: Ablation, group: Group) -> list[tuple[Line, Spread]]:
    """Gap to the run without delay of each delayed line, where a seed has both; without a value if one diverged."""
    gaps = [(line, ablation.gap(result.row)) for line, result in lines_of(ablation, group) if result.row.kind != "0"]
    return [(line, gap) for line, gap in gaps if gap is not None]


def by_delay(ablation: Ablation, group: Group) -> dict[Line, list[Point]]:
    """Gaps by constant delay: a line per correction and further settings of the delay."""
    constant = [row.setting for row in ablation.results if row.kind.isdecimal() and row.kind != "0"]
    settings = list(dict.fromkeys(further(setting) for setting in [ablation.one_update, *constant]))

    def place(row: Row) -> int | None:
        return int(row.kind) if row.setting in constant else None

    def line(row: Row) -> Line:
        more = further(row.setting)
        return delayed_line(ablation, row.correction, named("async", row.setting), settings.index(more))

    return dict(sorted(_series(ablation, group, place, line).items()))


def by_depth(ablation: Ablation, group: Group, kind: str) -> dict[Line, list[Point]]:
    """Gaps by number of stages under a kind of delay that depends on it: a line per correction."""
    return _series(
        ablation,
        group,
        lambda row: row.stages if row.delay == kind else None,
        lambda row: delayed_line(ablation, row.correction),
    )


def _series(
    ablation: Ablation, group: Group, place: Callable[[Row], int | None], line: Callable[[Row], Line]
) -> dict[Line, list[Point]]:
    """Gaps of a group's rows at their places; rows without a place are left out."""
    series: dict[Line, list[Point]] = {}
    for row in ablation.results:
        at = place(row) if row.group == group else None
        if at is not None and (gap := ablation.gap(row)):
            series.setdefault(line(row), []).append((at, gap))
    return series


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
        "lr_gap": lambda: draw_gaps_by_learning_rate(ablation),
        "momentum": lambda: draw_momentum(ablation),
        "depth": lambda: draw_depth(ablation),
        "delay": lambda: draw_delay(ablation),
        "length": lambda: draw_lengths(ablation),
    }
    written = []
    with style.context(["default", STYLE]):
        for name, draw in figures.items():
            file, figure = folder / f"{name}.svg", draw()
            if figure is None:
                file.unlink(missing_ok=True)
                continue
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            written.append(file.name)
    return written


def draw_overview(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay of every optimizer and correction, with its 95 % interval over seeds."""
    shown = {group: gaps for group in ablation.groups if (gaps := gaps_to_sync(ablation, group))}
    if not any(gap.values for gaps in shown.values() for _, gap in gaps):
        return None
    if max(map(len, shown.values())) > 1 + _MOST_IN_ONE_ROW:
        return _forest(shown)
    figure, (axes,) = panels(["Loss after training less that without delay"], "", "gap to sync")
    figure.set_size_inches(7.5, 1.3 + 0.36 * len(shown))
    for place, gaps in enumerate(shown.values()):
        draw_row(axes, place, gaps)
    axes.axvline(0, color=SYNC[0], lw=1.2, zorder=1)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(shown)), [group.label for group in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    legend(figure, [line for gaps in shown.values() for line, _ in gaps])
    return figure


def _forest(shown: Mapping[Group, Gaps]) -> Figure:
    """A panel per optimizer and a row per correction, on scales of their own."""
    lines = sorted({line for gaps in shown.values() for line, _ in gaps})
    size = 3.4, 0.7 + 0.27 * len(lines)
    figure, every_axes = panels([group.label for group in shown], "", _GAP_LABEL, size=size, more_width=1.6)
    for axes, gaps in zip(every_axes, shown.values()):
        known = dict(gaps)
        draw_forest(axes, [(line, known.get(line, Spread({}))) for line in lines])
    every_axes[0].set_yticks(range(len(lines)), [line.label for line in lines])
    every_axes[0].set_ylim(len(lines) - 0.5, -0.5)
    return figure


def draw_curves(ablation: Ablation, curves: Curves) -> Figure | None:
    """Validation loss against step at each row's learning rate: mean over seeds, band from minimum to maximum."""
    shown = {group: with_band(ablation, group, curves) for group in ablation.groups}
    shown = {group: entries for group, entries in shown.items() if entries}
    if not shown:
        return None
    figure, every_axes = panels([group.label for group in shown], "validation loss", "step")
    most = max(map(len, shown.values()))
    printed = most if most <= 2 + _MOST_IN_ONE_ROW else 0  # more final losses would cover the curves
    for axes, entries in zip(every_axes, shown.values()):
        for line, points in ((line, points) for line, _, points in entries if points):
            steps, means, lows, highs = zip(*points)
            axes.plot(steps, means, **line.stroke)
            axes.fill_between(steps, lows, highs, color=line.colour, alpha=0.18, linewidth=0)
        if printed:
            print_losses(axes, [(line, result) for line, result, _ in entries], decimals(ablation))
        axes.set_xlim(left=0)
    every = [points for entries in shown.values() for _, _, points in entries if points]
    every_axes[0].set_ylim(*_curve_range(every, printed))
    legend(figure, [line for entries in shown.values() for line, _, _ in entries], marker=False)
    return figure


def draw_learning_rates(ablation: Ablation) -> Figure | None:
    """Loss of every learning rate on the search seed; diverged ones are crosses at the top.

    The chosen one is ringed where the search is over. The axis ends above the worst chosen loss: lines of learning
    rates that are far worse leave it.
    """
    shown = {group: lines_of(ablation, group) for group in ablation.groups}
    shown = {group: entries for group, entries in shown.items() if any(result.searched for _, result in entries)}
    tried = [loss for entries in shown.values() for _, result in entries for loss in result.search.values()]
    losses = [loss for loss in tried if loss is not None]
    if not losses:
        return None
    figure, every_axes = panels([group.label for group in shown], "validation loss", "learning rate")
    chosen = [result.best for entries in shown.values() for _, result in entries if result.best is not None]
    low, worst = min(losses), max(chosen)
    high = min(max(losses), worst + _SEARCH_REACH * max(abs(worst), worst - low))
    margin = 0.07 * (high - low or 1.0)
    every_axes[0].set_ylim(low - margin, high + 2 * margin)
    for axes, entries in zip(every_axes, shown.values()):
        axes.set_xscale("log")
        axes.margins(x=0.12)
        lrs = sorted({lr for _, result in entries for lr in result.search})
        axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs], fontsize=8.5)
        axes.minorticks_off()
        for place, (line, result) in enumerate(entries):
            draw_search(figure, axes, line, result, high + margin, 8 * (place - (len(entries) - 1) / 2))
    over = any(result.search_over for entries in shown.values() for _, result in entries)
    more = [*(["chosen"] if over else []), *(["diverged"] if None in tried else [])]
    legend(figure, [line for entries in shown.values() for line, _ in entries], more=more)
    return figure


def draw_gaps_by_learning_rate(ablation: Ablation) -> Figure | None:
    """Gap at equal learning rate on the search seed: what the delay costs who keeps the learning rate that they had."""
    shown: dict[str, dict[Line, list[Point]]] = {}
    for group in ablation.groups:
        sync = ablation.sync(group)
        if sync is None:
            continue
        for line, result in lines_of(ablation, group):
            if result is not sync and result.searched:
                points = gaps_by_learning_rate(sync.search, result.search)
                shown.setdefault(group.label, {})[line] = points
    return _gap_figure(shown, "learning rate of both", {})


def draw_momentum(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay at the same momentum, each at its own best learning rate, by momentum."""
    shown: dict[str, dict[Line, list[Point]]] = {}
    for group in ablation.groups:
        for line, gap in gaps_to_sync(ablation, group) if group.momentum is not None else []:
            shown.setdefault(group.optimizer, {}).setdefault(line, []).append((group.momentum or 0.0, gap))
    return _gap_figure(shown, "momentum", {})


def draw_depth(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay by number of stages: a delay that depends on it, and a constant one of one update.

    None unless a kind of such a delay, PipeDream's or that of a fresh last stage, was run with at least two numbers of
    stages; the former, if both were.
    """
    for kind, name in _BY_STAGE.items():
        if len({row.stages for row in ablation.results if row.delay == kind} - {None}) > 1:
            shown = {group: series for group in ablation.groups if (series := by_depth(ablation, group, kind))}
            levels = {group.label: gaps_to_sync(ablation, group) for group in shown}
            return _gap_figure({group.label: series for group, series in shown.items()}, "stages", levels, name)
    return None


def draw_delay(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay by constant delay; None unless at least two delays were run."""
    if len({row.kind for row in ablation.results if row.kind.isdigit()} - {"0"}) < 2:
        return None
    shown = {group.label: series for group in ablation.groups if (series := by_delay(ablation, group))}
    return _gap_figure(shown, "delay in updates", {})


def draw_lengths(ablation: Ablation) -> Figure | None:
    """Gap to the run without delay of the same length, by length; None unless variants are lengths."""
    rows = [row for row in ablation.results if row.setting != ablation.no_delay and length_of(row.group) is not None]
    settings = list(dict.fromkeys(row.setting for row in rows))
    shown: dict[str, dict[Line, list[Point]]] = {}
    for row in rows:
        name = named("async" if row.kind == "1" else row.kind, row.setting)
        line = delayed_line(ablation, row.correction, name, settings.index(row.setting))
        if gap := ablation.gap(row):
            title = replace(row.group, variant=None).label
            shown.setdefault(title, {}).setdefault(line, []).append((length_of(row.group) or 0, gap))
    return _gap_figure(shown, "updates", {})


def _gap_figure(shown: Mapping[str, Series], x_label: str, levels: Mapping[str, Gaps], name: str = "") -> Figure | None:
    """A panel per title with gaps against ``x_label``, and ``levels`` that hold for all of it."""
    gaps = [gap for series in shown.values() for points in series.values() for _, gap in points]
    if not any(gap.values for gap in gaps):
        return None
    figure, every_axes = panels(list(shown), _GAP_LABEL, x_label, shared=False)
    lines = [line for series in shown.values() for line in series]
    for axes, (title, series) in zip(every_axes, shown.items()):
        draw_gaps(axes, series)
        for line, gap in levels.get(title, ()):
            draw_level(axes, line, gap)
            lines.append(line)
    more = [name, CONSTANT] if levels else []
    legend(figure, lines, more=[*more, *([ANY_DIVERGED] if any(gap.diverged for gap in gaps) else [])])
    return figure


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
