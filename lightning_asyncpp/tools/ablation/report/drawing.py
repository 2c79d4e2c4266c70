"""How the plots of an ablation look: panels, legend, and what is drawn in them alike everywhere.

matplotlib is imported when a figure is made, and without pyplot: no display, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_asyncpp.tools.ablation.report.summary import Result, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, Spread]
Series = Mapping["Line", Sequence[Point]]
Gaps = Sequence[tuple["Line", Spread]]

# Okabe and Ito's palette, told apart by colour-blind readers too; markers say the same once more.
SYNC, ASYNC = ("#222222", "o"), ("#D55E00", "s")
CORRECTED = (
    ("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"),
    ("#8C564B", "<"), ("#999933", ">"), ("#7F7F7F", "*"),
)  # fmt: skip
_MUTED, _GRID = "#5c6875", "#e3e7ec"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "asyncpp", "svg.fonttype": "none", "font.size": 10,
    "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.edgecolor": "#9aa5b1", "axes.labelcolor": "#222222", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": _GRID, "xtick.color": _MUTED, "ytick.color": _MUTED,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5,
    "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
_LOOKS = len(CORRECTED)
_RING: dict[str, Any] = {"ls": "", "marker": "o", "ms": 12, "mfc": "none", "mew": 1.5}
_CROSS: dict[str, Any] = {"ls": "", "marker": "x", "ms": 7, "mew": 2}
VARIABLE, FRESH, CONSTANT = "PipeDream: delay by stage", "a fresh last stage", "constant: one update"
ANY_DIVERGED = "a seed diverged"
_EXTRA: dict[str, dict[str, Any]] = {
    "chosen": _RING, "diverged": _CROSS, ANY_DIVERGED: _CROSS,
    VARIABLE: {"ls": "-"}, FRESH: {"ls": "-"}, CONSTANT: {"ls": "--"},
}  # fmt: skip
_LEGEND_ROWS = 3  # that a figure has room for
_COLUMNS, _PANEL = 4, (3.1, 2.7)  # panels side by side at most; width and height of one in inches


@dataclass(frozen=True, order=True)
class Line:
    """A state of the comparison: its place in the legend, which decides how it is drawn everywhere, and its name.

    Place 0 is no delay, 1 a delay of one update; the others share eight colours, and those of the same colour differ
    in marker and in the dots between the dashes of their line.
    """

    place: int
    label: str

    @property
    def colour(self) -> str:
        """As matplotlib takes it."""
        return (SYNC, ASYNC)[self.place][0] if self.place < 2 else CORRECTED[(self.place - 2) % _LOOKS][0]

    @property
    def marker(self) -> str:
        """As matplotlib takes it."""
        if self.place < 2:
            return (SYNC, ASYNC)[self.place][1]
        again, look = divmod(self.place - 2, _LOOKS)
        return CORRECTED[(look + again) % _LOOKS][1]

    @property
    def stroke(self) -> dict[str, Any]:
        """Colour and kind of its line: solid; from the ninth correction on a dash with a dot, with two, ..."""
        dots = max(0, self.place - 2) // _LOOKS
        return {"color": self.colour, "ls": (0, (6, 1.5, *(1, 1.5) * dots)) if dots else "-"}


def panels(
    titles: Sequence[str],
    y_label: str,
    x_label: str,
    shared: bool = True,
    size: tuple[float, float] = _PANEL,
    more_width: float = 0.4,
) -> tuple[Figure, list[Axes]]:
    """Small multiples, by default with one range of the vertical axis, so that heights compare across panels.

    Args:
        titles: of the panels; at most four stand side by side.
        y_label, x_label: what the axes show.
        shared: whether the range of the vertical axis is.
        size: width and height of a panel in inches.
        more_width: of the figure, for what stands at the left of its panels.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(titles) / _COLUMNS)
    columns = math.ceil(len(titles) / rows)
    figure = Figure(figsize=(size[0] * columns + more_width, size[1] * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=shared, squeeze=False).ravel().tolist()
    for place, (axes, title) in enumerate(zip(grid, titles)):
        axes.set_title(title, loc="left")
        axes.set(xlabel=x_label, ylabel="" if place % columns else y_label)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    return figure, grid[: len(titles)]


def legend(figure: Figure, lines: Sequence[Line], marker: bool = True, more: Sequence[str] = ()) -> None:
    """One legend above all panels: the lines, and what else the drawing uses."""
    from matplotlib.lines import Line2D

    marked = [(line, line.marker if marker else "") for line in sorted(set(lines))]
    handles = [Line2D([], [], marker=mark, label=line.label, **line.stroke) for line, mark in marked]
    handles += [Line2D([], [], color=_MUTED, label=label, **_EXTRA[label]) for label in more]
    columns = min(len(handles), 2 * round(figure.get_figwidth() / _PANEL[0]))
    more_rows = max(0, math.ceil(len(handles) / columns) - _LEGEND_ROWS)
    figure.set_figheight(figure.get_figheight() + 0.2 * more_rows)  # a long legend would squeeze the panels
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def draw_row(axes: Axes, place: int, gaps: Gaps) -> None:
    """A row of the overview: its gaps, and at the right which seeds diverged."""
    lost = [f"{line.label}: {_diverged(gap)}" for line, gap in gaps if gap.diverged]
    _say_at_right(axes, place, ", ".join(lost))
    known = [(line, gap.mean, gap.half_width) for line, gap in gaps if gap.mean is not None]
    ends = [0.0, *(mean for _, mean, _ in known)]
    axes.plot(ends, [place] * len(ends), color=_GRID, lw=5, solid_capstyle="round", zorder=1)
    for line, mean, half_width in known:
        axes.errorbar(mean, place, xerr=half_width, color=line.colour, marker=line.marker, ms=7, capsize=3, ls="")


def draw_forest(axes: Axes, rows: Gaps) -> None:
    """A row per line: its gap with its 95 % interval, between the first one's (dashed) and none."""
    for place, (line, gap) in enumerate(rows):
        if gap.mean is not None:
            axes.errorbar(
                gap.mean, place, xerr=gap.half_width, color=line.colour, marker=line.marker, ms=6, capsize=3, ls=""
            )
        if gap.diverged:
            _say_at_right(axes, place, _diverged(gap))
    if rows and rows[0][1].mean is not None:
        axes.axvline(rows[0][1].mean, color=rows[0][0].colour, lw=1.2, ls="--", zorder=1)
    axes.axvline(0, color=SYNC[0], lw=1.2, zorder=1)
    axes.grid(visible=False, axis="y")


def _say_at_right(axes: Axes, place: int, text: str) -> None:
    at_right: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    axes.text(1, place - 0.14, text, color=_MUTED, fontsize=8.5, **at_right)


def print_losses(axes: Axes, entries: Sequence[tuple[Line, Result]], decimals: int) -> None:
    """Final losses in the upper right corner, in the colours of the curves."""
    for position, (line, result) in enumerate(entries):
        loss = result.loss
        mean = "" if loss.mean is None else f" {loss.mean:.{decimals}f}"
        lost = f" ({_diverged(loss)})" if loss.diverged else ""
        axes.annotate(
            f"{line.label}{mean}{lost}", (1, 1), (-2, -4 - 13 * position), xycoords="axes fraction",
            textcoords="offset points", ha="right", va="top", color=line.colour, fontsize=9,
        )  # fmt: skip


def _diverged(spread: Spread) -> str:
    return f"{spread.diverged} of {spread.diverged + len(spread.values)} diverged" if spread.values else "diverged"


def draw_search(figure: Figure, axes: Axes, line: Line, result: Result, ceiling: float, aside: float) -> None:
    """A row's search; crosses stand ``aside`` points beside their learning rate, so that none hides another."""
    from matplotlib.transforms import ScaledTranslation

    finished = [(lr, loss) for lr, loss in result.search.items() if loss is not None]
    diverged = [lr for lr, loss in result.search.items() if loss is None]
    if finished:
        axes.plot(*zip(*finished), marker=line.marker, **line.stroke)
    if diverged:
        shift = axes.transData + ScaledTranslation(aside / 72, 0, figure.dpi_scale_trans)
        axes.plot(diverged, [ceiling] * len(diverged), color=line.colour, transform=shift, **_CROSS)
    if result.lr is not None and result.best is not None and result.search_over:
        axes.plot(result.lr, result.best, color=line.colour, **_RING)


def draw_gaps(axes: Axes, series: Series) -> None:
    """Gaps at evenly spaced positions, with their 95 % intervals over seeds; a cross at the top if any diverged."""
    places = sorted({place for points in series.values() for place, _ in points})
    for rank, (line, points) in enumerate(series.items()):
        aside = min(0.06, 0.5 / len(series)) * (rank - (len(series) - 1) / 2)
        at = [(places.index(place) + aside, gap) for place, gap in sorted(points, key=lambda point: point[0])]
        known = [(x, gap.mean, gap.half_width or 0.0) for x, gap in at if gap.mean is not None]
        if known:
            x, means, errors = zip(*known)
            axes.errorbar(x, means, errors, marker=line.marker, capsize=3, elinewidth=1, **line.stroke)
        lost = [x for x, gap in at if gap.diverged]
        axes.plot(
            lost, [0.97 - 0.07 * rank] * len(lost), color=line.colour, transform=axes.get_xaxis_transform(), **_CROSS
        )
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    axes.set_xlim(-0.4, len(places) - 0.6)
    axes.axhline(0, color=SYNC[0], lw=1, zorder=1)


def draw_level(axes: Axes, line: Line, gap: Spread) -> None:
    """A gap that does not depend on the depth: a dashed line, its 95 % interval a band."""
    if gap.mean is None:
        return
    axes.axhline(gap.mean, color=line.colour, ls="--", lw=1.5)
    if gap.half_width:
        axes.axhspan(gap.mean - gap.half_width, gap.mean + gap.half_width, color=line.colour, alpha=0.12, lw=0)
