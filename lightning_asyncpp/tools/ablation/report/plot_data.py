"""What the plots of an ablation show: which rows become which lines, and the points of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_asyncpp.tools.ablation.grid import UNCORRECTED, Group, Row, further, named
from lightning_asyncpp.tools.ablation.report.drawing import Line, Point
from lightning_asyncpp.tools.ablation.report.summary import Ablation, Result, Spread, band

Curves = Mapping[str, Sequence[tuple[int, float]]]
Band = list[tuple[int, float, float, float]]


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
