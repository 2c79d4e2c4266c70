"""The pictures of an ablation, as SVG: gaps, loss curves, the search of the learning rate, gaps against what is varied.

The same data give the same bytes (with the same matplotlib), so a picture under version control changes only when its
data do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.ablations.law import CLIPPING, bootstrap, costs, fit, points_of
from research.ablations.lengths import length_of
from research.ablations.rows import UNCORRECTED, Group, Row, with_setting
from research.ablations.sides import delays_of, families
from research.ablations.summary import NO_DELAY, Ablation, Result, half_width

# Okabe and Ito's palette, told apart by colour-blind readers too; markers say the same once more.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#999933")
_MARKERS, _DASHES, _SYNC = "s^DvPX<>", ("-", "--", ":"), "#222222"
_CROSS: dict[str, Any] = {"ls": "", "marker": "x", "ms": 7, "mew": 2}
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "asyncpp", "svg.fonttype": "none", "figure.facecolor": "white", "axes.titleweight": "bold",
    "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e3e7ec", "legend.frameon": False, "lines.markersize": 5,
}  # fmt: skip
_GAP_LABEL = "gap to sync (own scale)"  # a robust optimizer's gap could not be seen on a shared one
_COLUMNS, _PANEL = 4, (3.3, 2.7)  # panels side by side at most; width and height of one in inches
Points = dict[str, dict[str, list[tuple[float, pd.Series]]]]
"""Title of a panel -> label of a line -> what it is against, and the gap there by seed."""


def write_plots(folder: Path, ablation: Ablation, curves: pd.DataFrame) -> list[str]:
    """Write every picture that the data suffice for, remove the others, and return the names of the files.

    The pictures of the law and of both sides replace those of the same gaps.
    """
    validation = curves[curves.metric == "val_loss"]
    figures: dict[str, Callable[[], Figure | None]] = {
        "gaps": lambda: draw_gaps(ablation),
        "curves": lambda: draw_curves(ablation, validation),
        "lr": lambda: draw_search(ablation),
        "lr_gap": lambda: draw_against("learning rate of both", gaps_by_learning_rate(ablation)),
        "momentum": lambda: draw_against("momentum", gaps_by(ablation, lambda row: row.momentum, momentum=None)),
        "length": lambda: draw_against("updates", gaps_by(ablation, lambda row: length_of(row.group), variant=None)),
        "growth": lambda: draw_against("update", gaps_by_update(ablation, validation)),
        "law": lambda: draw_law(ablation),
        "sides": lambda: draw_sides(ablation),
    }  # fmt: skip
    if _stages_of_least(ablation) > 1 or len(delays_of(ablation)) > 1:
        figures["gaps"] = lambda: None
    written = []
    with style.context(["default", _STYLE]):
        for name, draw in figures.items():
            file, figure = folder / f"{name}.svg", draw()
            file.unlink(missing_ok=True)
            if figure is not None:
                figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
                written.append(file.name)
    return written


def label_of(row: Row) -> str:
    """Return the name of a row's line: sync, async, async + EF, least (microbatches=8, stages=4) + EF, ..."""
    if row.setting == NO_DELAY:
        return "sync"
    kind = "async" if row.kind == "1" else row.kind
    name = with_setting(kind, row.setting)
    return name if row.correction == UNCORRECTED else f"{name} + {row.correction}"


def looks_of(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and kind of line of each label, all different."""
    others = [label for label in dict.fromkeys(["async", *labels]) if label != "sync"]
    looks: dict[str, dict[str, Any]] = {"sync": {"color": _SYNC, "marker": "o"}}
    for place, label in enumerate(others):
        again, look = divmod(place, len(_COLOURS))
        marker, dashes = _MARKERS[(look + again) % len(_MARKERS)], _DASHES[again % len(_DASHES)]
        looks[label] = {"color": _COLOURS[look], "marker": marker, "ls": dashes}
    return looks


def lines_of(ablation: Ablation, group: Group) -> dict[str, Result]:
    """Return the rows without delay, and at a delay of one update without and with each correction."""
    delayed = [ablation.delayed(group, correction) for correction in (UNCORRECTED, *ablation.corrections)]
    return {label_of(one.row): one for one in [ablation.sync(group), *delayed] if one is not None}


def gaps_by_learning_rate(ablation: Ablation) -> Points:
    """Return the gaps at equal learning rates on the search seed: the cost of the delay for who keeps the old rate."""
    found: Points = {}
    for group in ablation.groups:
        lines = lines_of(ablation, group)
        sync = lines.pop("sync", None)
        for label, result in lines.items():
            if sync is not None and result.searched:
                both = [lr for lr in result.search if not math.isnan(sync.search.get(lr, math.nan))]
                points = [(lr, pd.Series([result.search[lr] - sync.search[lr]])) for lr in both]
                found.setdefault(group.label, {})[label] = points
    return found


def gaps_by(ablation: Ablation, place: Callable[[Row], float | None], **without: Any) -> Points:
    """Return the gaps to the run without delay against something rows differ in; ``without``: its column."""
    found: Points = {}
    for row in ablation.results:
        at, gap, other = place(row), ablation.gap(row), row._replace(**without)
        if row.setting != NO_DELAY and at is not None and gap is not None:
            lines = found.setdefault(other.group.label, {})
            lines.setdefault(label_of(other), []).append((at, gap))
    return found


def gaps_by_update(ablation: Ablation, curves: pd.DataFrame) -> Points:
    """Return the gaps to the run without delay at every validation, where a training starts synchronously."""
    found: Points = {}
    for row in sorted(ablation.results, key=ablation.order):
        sync = ablation.sync(row.group)
        others = [one.delay for one in ablation.results if one.group == row.group]
        if row.setting != NO_DELAY and sync is not None and any("synchronous_start=" in other for other in others):
            gap = (_by_update(ablation.results[row], curves) - _by_update(sync, curves)).dropna()  # of all seeds
            label = next(
                (word for word in row.delay.split() if "=" in word and "microbatches" not in word), "throughout"
            )
            if len(gap):
                found.setdefault(row.group.label, {})[label] = [(step, gap.loc[step]) for step in gap.index]
    return {title: lines for title, lines in found.items() if len(lines) > 1}


def draw_gaps(ablation: Ablation) -> Figure | None:
    """Draw the gap to the run without delay of every delayed row, with its 95 % interval: a panel per optimizer."""
    rows = [row for row in ablation.results if row.setting != NO_DELAY and ablation.gap(row) is not None]
    labels = list(dict.fromkeys(map(label_of, sorted(rows, key=lambda row: ablation.order(row)[1:]))))
    groups = [group for group in ablation.groups if any(row.group == group for row in rows)]
    if not rows:
        return None
    size = _PANEL[0] + 0.07 * max(map(len, labels)) / len(groups), 0.8 + 0.25 * len(labels)
    figure, panels = _panels([group.label for group in groups], "", _GAP_LABEL, size, sharey=True)
    looks = looks_of(labels)
    for axes, group in zip(panels, groups):
        for row in (row for row in rows if row.group == group):
            label, gap = label_of(row), ablation.gap(row)
            assert gap is not None
            look = looks[label] | {"ls": ""}
            axes.errorbar(gap.mean(), labels.index(label), xerr=half_width(gap), capsize=3, **look)
            if gap.isna().any():
                text = f"{gap.isna().sum()} of {len(gap)} diverged"
                axes.text(1, labels.index(label), text, transform=axes.get_yaxis_transform(), ha="right", fontsize=8)
        axes.axvline(0, color=_SYNC, lw=1.2, zorder=1)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
    return figure


def draw_curves(ablation: Ablation, curves: pd.DataFrame) -> Figure | None:
    """Draw validation loss against step at each row's learning rate: mean over seeds, band from minimum to maximum."""
    shown = {group: lines_of(ablation, group) for group in ablation.groups}
    if curves.empty:
        return None
    figure, panels = _panels([group.label for group in shown], "validation loss", "step", sharey=True)
    looks, ends = looks_of([label for lines in shown.values() for label in lines]), []
    for axes, lines in zip(panels, shown.values()):
        for label, result in lines.items():
            chosen = curves[curves.cell.isin(result.cells)].drop_duplicates(["cell", "step"])
            values = chosen.pivot(index="step", columns="cell", values="value").dropna()
            if values.empty:
                continue
            look = looks[label] | {"marker": ""}
            axes.plot(values.index, values.mean(axis=1), label=label, **look)
            axes.fill_between(
                values.index, values.min(axis=1), values.max(axis=1), color=look["color"], alpha=0.18, lw=0
            )
            late = values[values.index >= 0.25 * values.index[-1]]  # at first all fall alike
            ends += [late.min().min(), late.max().max()]
    if ends:
        margin = 0.05 * (max(ends) - min(ends) or 1.0)
        panels[0].set_ylim(min(ends) - margin, max(ends) + margin)
    return _with_legend(figure, panels)


def draw_search(ablation: Ablation) -> Figure | None:
    """Draw the loss of every learning rate on the search seed, the chosen one ringed, diverged ones as crosses."""
    shown = {group: lines_of(ablation, group) for group in ablation.groups}
    shown = {group: lines for group, lines in shown.items() if any(one.searched for one in lines.values())}
    chosen = [one.search[one.lr] for lines in shown.values() for one in lines.values() if one.lr is not None]
    losses = [loss for lines in shown.values() for one in lines.values() for loss in one.search.values()]
    finished = [loss for loss in losses if not math.isnan(loss)]
    if not finished:
        return None
    figure, panels = _panels([group.label for group in shown], "validation loss", "learning rate", sharey=True)
    looks = looks_of([label for lines in shown.values() for label in lines])
    for axes, lines in zip(panels, shown.values()):
        for label, result in lines.items():
            search = pd.Series(result.search)
            axes.plot(search.index, search, label=label, **looks[label])
            if result.lr is not None:
                ring = {"ls": "", "marker": "o", "ms": 11, "mfc": "none", "color": looks[label]["color"]}
                axes.plot([result.lr], [result.search[result.lr]], **ring)
            _mark_diverged(axes, search.index[search.isna()], looks[label]["color"])
        lrs = sorted({lr for one in lines.values() for lr in one.search})
        axes.set_xscale("log")
        axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs], fontsize=8)
        axes.minorticks_off()
    low, high = min(finished), min(max(finished), 1.25 * max(chosen))  # far worse ones leave the picture
    margin = 0.07 * (high - low or 1.0)
    panels[0].set_ylim(low - margin, high + 2 * margin)
    return _with_legend(figure, panels)


def draw_against(what: str, points: Points) -> Figure | None:
    """Draw gaps against something, evenly spaced, with their 95 % intervals.

    Returns:
        None unless some line has two points.
    """
    points = {title: lines for title, lines in points.items() if any(len(line) > 1 for line in lines.values())}
    if not points:
        return None
    figure, panels = _panels(list(points), _GAP_LABEL, what)
    looks = looks_of([label for lines in points.values() for label in lines])
    for axes, lines in zip(panels, points.values()):
        places = sorted({at for line in lines.values() for at, _ in line})
        for label, unsorted in lines.items():
            line = sorted(((places.index(at), gap) for at, gap in unsorted), key=lambda point: point[0])
            at, means = [place for place, _ in line], [gap.mean() for _, gap in line]
            errors = [half_width(gap) or 0.0 for _, gap in line]
            axes.errorbar(at, means, errors, label=label, capsize=3, **looks[label])
            _mark_diverged(axes, [place for place, gap in line if gap.isna().any()], looks[label]["color"])
        axes.axhline(0, color=_SYNC, lw=1, zorder=1)
        axes.set_xticks(range(len(places)), [f"{place:g}" for place in places], fontsize=8)
    return _with_legend(figure, panels)


def draw_law(ablation: Ablation) -> Figure | None:
    """Draw the cost of old gradients against their share: the law, and means over the seeds by number of stages.

    The cost of clipping before the whole norm is known is subtracted.

    Returns:
        None unless the least staleness was run with several numbers of stages.
    """
    if _stages_of_least(ablation) < 2:
        return None
    laws = points_of(ablation)
    figure, panels = _panels(list(laws), "loss less L and c", "share of old gradients, root mean square", sharey=False)
    looks = looks_of([f"P = {stages}" for stages in (1, 2, 4, 8, 16)])
    for axes, data in zip(panels, laws.values()):
        law, shares = fit(data), np.linspace(0.0, data.phi.max(), 101)
        axes.plot(shares, law.a * shares**law.b, color=_SYNC, lw=1.2)
        axes.fill_between(shares, *costs(bootstrap(data), shares), color=_SYNC, alpha=0.18, lw=0)
        above = data.assign(loss=data.loss - data.seed.map(law) - law[CLIPPING] * data[CLIPPING])
        above = above.groupby("row")[["stages", "phi", "loss"]].mean()
        for stages, ones in above.groupby("stages"):
            label = f"P = {stages:g}"
            axes.plot(ones.phi, ones.loss, label=label, **looks[label] | {"ls": ""})
    return _with_legend(figure, panels)


def draw_sides(ablation: Ablation) -> Figure | None:
    """Draw each optimizer alone, corrected and looking ahead, by delay: above its best run without, and above its own.

    Returns:
        None if nothing looks ahead, or under one delay only.
    """
    settings = delays_of(ablation)
    if len(settings) < 2:
        return None
    shown = list(families(ablation))
    titles = [family.label for family in shown]
    figure, panels = _panels([*titles, *titles], "above the best without delay\n(own scale)", "")
    panels[len(shown)].set_ylabel("above itself without delay\n(own scale)")
    places = {setting: place for place, setting in enumerate([NO_DELAY, *reversed(settings)])}
    ticks = ["no delay", *(setting[0].partition(" ")[2].replace("microbatches", "m") for setting in reversed(settings))]
    looks = looks_of([kind for family in shown for kind in family.gaps])
    distances = [(one, one.gaps) for one in shown] + [(one, one.costs) for one in shown]
    for axes, (family, lines) in zip(panels, distances):
        for kind, line in lines.items():
            ordered = sorted((setting for setting in line if setting in places), key=lambda setting: places[setting])
            means = [line[setting].mean() if len(line[setting]) else 0.0 for setting in ordered]
            errors = [(family.half_width or 0.0) * (len(line[setting]) > 0) for setting in ordered]
            axes.errorbar([places[one] for one in ordered], means, errors, label=kind, capsize=3, **looks[kind])
        axes.axhline(0, color=_SYNC, lw=1, zorder=1)
        axes.set_xticks(range(len(ticks)), ticks, fontsize=8)
        axes.set_xlim(-0.2, len(ticks) - 0.8)
    return _with_legend(figure, panels)


def _by_update(result: Result, curves: pd.DataFrame) -> pd.DataFrame:
    """Return the validation losses of a row's trainings: a line per update, a column per seed."""
    chosen = curves[curves.cell.isin(result.cells)].pivot(index="step", columns="cell", values="value")
    return chosen.rename(columns=dict(zip(result.cells, result.losses.dropna().index, strict=True)))


def _stages_of_least(ablation: Ablation) -> int:
    """Return how many numbers of stages the least staleness was run with."""
    return len({row.stages for row in ablation.results if row.kind == "least"})


def _panels(
    titles: Sequence[str], y_label: str, x_label: str, size: tuple[float, float] = _PANEL, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(len(titles) / _COLUMNS)
    columns = math.ceil(len(titles) / rows)
    figure = Figure(figsize=(size[0] * columns + 0.4, size[1] * rows + 0.4), layout="constrained")
    every = figure.subplots(rows, columns, sharey=sharey, squeeze=False).ravel().tolist()
    for place, (axes, title) in enumerate(zip(every, titles)):
        axes.set_title(title, loc="left")
        axes.set(xlabel=x_label, ylabel="" if place % columns else y_label)
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    return figure, every[: len(titles)]


def _with_legend(figure: Figure, panels: Sequence[Axes]) -> Figure:
    """Put one legend above all panels."""
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    columns = max(1, round(figure.get_figwidth() / 2.2))
    figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(handles) / columns))
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=columns)
    return figure


def _mark_diverged(axes: Axes, places: Sequence[float], colour: str) -> None:
    axes.plot(places, [0.97] * len(places), color=colour, transform=axes.get_xaxis_transform(), **_CROSS)
