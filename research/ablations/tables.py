"""The tables of an ablation as Markdown: without delay against delayed and corrected, other delays, the lr search."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd

from research.ablations.lengths import further_updates, length_of
from research.ablations.rows import UNCORRECTED, Group, Row, Setting, with_setting
from research.ablations.sides import Family, delays_of, families
from research.ablations.summary import (
    NO_DELAY,
    Ablation,
    Result,
    difference,
    half_width,
    no_share,
    share_recovered,
)

EDGE, ONE_LR = "†", "‡"
_NOTES = {
    EDGE: f"{EDGE} edge of the search: the best learning rate is the lowest or the highest one tried.",
    ONE_LR: f"{ONE_LR} a single learning rate was run: not searched for.",
}
_MOST_BESIDE = 2  # corrections that the main table has columns for
_SAME = 1e-6  # relative difference of losses below which they are equal in single precision


class Cells:
    """Cells of the tables of one ablation, all with the same number of decimals; empty where nothing was run."""

    def __init__(self, ablation: Ablation) -> None:
        self.ablation = ablation
        self.decimals = decimals(ablation)
        self.seeds = len({run.key.seed for run in ablation.runs})

    def loss(self, row: Row) -> str:
        """Loss and learning rate of a row, its diverged seeds named; and how many seeds, if others have more."""
        result = self.ablation.results.get(row)
        if result is None:
            return ""
        if result.lr is None:
            return f"diverged at all {len(result.search)} lrs"
        mark = f" {EDGE}" if result.at_edge else "" if result.searched else f" {ONE_LR}"
        lr, lost, total = f"({result.lr:g}{mark})", int(result.losses.isna().sum()), len(result.losses)
        if lost == total:
            return f"{lost} of {total} diverged {lr}"
        if lost:
            return f"{lost} of {total} diverged, else {self.spread(result.losses)} {lr}"
        return f"{self.spread(result.losses)} {lr}{_fewer(result.losses, self.seeds)}"

    def gap(self, row: Row) -> str:
        """Difference to the run without delay, paired by seed."""
        result, sync = self.ablation.results.get(row), self.ablation.sync(row.group)
        if result is None or sync is None:
            return ""
        gap = difference(result, sync)
        if not gap.count():
            return no_share(gap) or ""
        return self.spread(gap, "+") + _fewer(gap, len(result.losses))

    def share(self, row: Row) -> str:
        """Share of the gap that a row recovers, in per cent, or why there is none; empty for an uncorrected row."""
        delayed = self.ablation.uncorrected_row(row)
        first, second, third = self.ablation.sync(row.group), *map(self.ablation.results.get, (delayed, row))
        if delayed == row or first is None or second is None or third is None:
            return ""
        share = share_recovered(first, second, third)
        return share if isinstance(share, str) else f"{per_cent(share)}{_fewer(share, len(third.losses))}"

    def searched(self, row: Row) -> dict[float, str]:
        """The search of a row: learning rate to loss, the chosen one in bold."""
        result = self.ablation.results.get(row)
        if result is None:
            return {}
        cells = {lr: self.number(loss) for lr, loss in result.search.items()}
        return cells | ({} if result.lr is None else {result.lr: f"**{cells[result.lr]}**"})

    def number(self, loss: float) -> str:
        """A loss."""
        return "diverged" if math.isnan(loss) else f"{loss:.{self.decimals}f}"

    def spread(self, values: pd.Series, sign: str = "") -> str:
        """Mean, and half of its interval if it has one."""
        half = half_width(values)
        return f"{values.mean():{sign}.{self.decimals}f}" + ("" if half is None else f" ± {self.number(half)}")


def decimals(ablation: Ablation) -> int:
    """Return the decimals that show two digits of the smallest loss and of the smallest gap; at least 3, at most 8."""
    smallest = []
    for row, result in ablation.results.items():
        loss, gap = abs(result.losses.mean()), ablation.gap(row)
        if loss:
            smallest.append(loss)
        if loss and gap is not None and no_share(gap) != "gap within noise" and abs(gap.mean()) > _SAME * loss:
            smallest.append(abs(gap.mean()))
    least = min((size for size in smallest if not math.isnan(size)), default=1.0)
    return min(max(1 - int(f"{least:.1e}".split("e")[1]), 3), 8)


def per_cent(share: pd.Series, sign: str = "") -> str:
    """Return the mean and half of its interval as whole per cents."""
    half = half_width(share)
    return f"{round(100 * share.mean()):{sign}}{'' if half is None else f' ± {round(100 * half)}'} %"


def _fewer(values: pd.Series, total: int) -> str:
    """Return how many seeds have a value, if fewer than ``total``."""
    count, lost = int(values.count()), int(values.isna().sum())
    if lost:
        return f", {lost} of {count + lost} diverged"
    return f", {count} seed{'s' if count > 1 else ''}" if count < total else ""


def page(ablation: Ablation, plots: Sequence[str]) -> str:
    """Return the whole report: a heading, every table that has rows, and the plots, whose files lie beside it."""
    definitions = Definitions()
    tables = {kind: text for kind in TABLES if (text := TABLES[kind](ablation))}
    parts = [f"# Ablation: {_escape(ablation.name)}"]
    parts += [f"## {TITLES[kind]}\n\n{definitions.below(kind, text)}" for kind, text in tables.items()]
    if plots:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{plot.removesuffix('.svg')}]({plot})" for plot in plots))
    return "\n\n".join(parts) + "\n"


def main_table(ablation: Ablation) -> str:
    """Return a table of the loss without delay, with one of one update, and with each correction."""
    compared = (NO_DELAY, ablation.one_update)
    shown = [g for g in ablation.groups if any(r.group == g and r.setting in compared for r in ablation.results)]
    if not shown:
        return ""
    beside = _corrections_of_one_update(ablation)
    beside = beside if len(beside) <= _MOST_BESIDE else []
    delayed = with_setting("async", ablation.one_update)
    header = [*_group_header(ablation), "sync", delayed, "gap"]
    for correction in beside:
        header += [f"{delayed} + {correction}", f"{correction} recovers"]
    cells = Cells(ablation)
    lines = [_main_line(cells, group, beside) for group in shown]
    names = len(_group_header(ablation))
    kept = [column for column in range(len(header)) if column < names or any(line[column] for line in lines)]
    header, *lines = [[line[column] for column in kept] for line in (header, *lines)]
    return _with_notes(_markdown(header, lines), counts(ablation))


def _main_line(cells: Cells, group: Group, beside: Sequence[str]) -> list[str]:
    sync, delayed = (Row(*group, *setting, UNCORRECTED) for setting in (NO_DELAY, cells.ablation.one_update))
    line = [*_group_names(cells.ablation, group), cells.loss(sync), cells.loss(delayed), cells.gap(delayed)]
    for correction in beside:
        corrected = delayed._replace(correction=correction)
        line += [cells.loss(corrected), cells.share(corrected)]
    return line


def correction_table(ablation: Ablation) -> str:
    """A line per correction at a delay of one update; empty where they fit beside the losses of the main table."""
    used = _corrections_of_one_update(ablation)
    if len(used) <= _MOST_BESIDE:
        return ""
    cells = Cells(ablation)
    lines = [
        [*_group_names(ablation, group), row.correction, cells.loss(row), cells.gap(row), cells.share(row)]
        for group in ablation.groups
        for row in (Row(*group, *ablation.one_update, name) for name in [UNCORRECTED, *used])
        if row in ablation.results
    ]
    header = [*_group_header(ablation), "correction", "loss", "gap to sync", "recovers"]
    return _with_notes(_markdown(header, lines), counts(ablation))


def equal_table(ablation: Ablation) -> str:
    """All three at every learning rate that all three were run at, on the search seed.

    A training that two corrections share, such as one with its own and one with another row's learning rate, stands
    once, with the one whose learning rate was searched.
    """
    cells = Cells(ablation)
    lines: dict[tuple[Group, str], list[str]] = {}  # by the corrected training
    for group in ablation.groups:
        results = [ablation.delayed(group, name) for name in _corrections_of_one_update(ablation)]
        for corrected in sorted((one for one in results if one is not None), key=lambda one: not one.searched):
            for lr, line in _equal_lines(cells, corrected):
                lines.setdefault((group, corrected.trainings[lr]), line)
    delayed = with_setting("async", ablation.one_update)
    header = [*_group_header(ablation), "correction", "lr", "sync", delayed, "corrected", "recovers"]
    return _with_notes(_markdown(header, list(lines.values()))) if lines else ""


def _equal_lines(cells: Cells, corrected: Result) -> Iterator[tuple[float, list[str]]]:
    """Learning rate and line, wherever no delay, delay and the corrected row have finished."""
    row, ablation = corrected.row, cells.ablation
    sync, delayed = ablation.sync(row.group), ablation.delayed(row.group)
    if sync is None or delayed is None or not sync.searched:
        return
    gap = difference(delayed, sync)
    columns = [cells.searched(one.row) if one.searched else {} for one in (sync, delayed, corrected)]
    for lr in corrected.search:
        losses = [one.search.get(lr, math.nan) for one in (sync, delayed, corrected)]
        if any(map(math.isnan, losses)):
            continue
        first, second, third = losses
        # One seed says nothing of noise: a gap that is none over the seeds is none here.
        reason = no_share(gap) or no_share(pd.Series([second - first]), abs(second - third))
        share = reason or f"{round(100 * (second - third) / (second - first))} %"
        shown = [column.get(lr, cells.number(loss)) for column, loss in zip(columns, losses)]
        yield lr, [*_group_names(ablation, row.group), row.correction, f"{lr:g}", *shown, share]


def delay_table(ablation: Ablation) -> str:
    """Return a table of loss and gap under every other delay, the delay of one update first; empty without others."""
    other = [row for row in ablation.results if row.setting not in (NO_DELAY, ablation.one_update)]
    if not other:
        return ""
    compared = {row.group for row in other}
    reference = [r for r in ablation.results if r.setting == ablation.one_update and r.group in compared]
    rows = sorted([*reference, *other], key=ablation.order)
    header = [*_group_header(ablation), "delay", "stages", "correction", "loss", "gap to sync", "recovers"]
    cells = Cells(ablation)
    lines = [[*_row_names(ablation, row), cells.loss(row), cells.gap(row), cells.share(row)] for row in rows]
    notes = []
    if any(length_of(row.group) is not None for row in rows):
        header.append("further updates")
        further = [further_updates(ablation, row) for row in rows]
        lines = [[*line, "" if more is None else per_cent(more, "+")] for line, more in zip(lines, further)]
        notes.append(_LENGTH_NOTE)
    return _with_notes(_markdown(header, lines), *notes, counts(ablation))


def sides_table(ablation: Ablation) -> str:
    """Return a table of each row's distance to its family's best run without delay; empty where nothing looks ahead."""
    settings = delays_of(ablation)
    lines = [line for family in families(ablation) for line in _family_lines(family, settings)]
    if not settings or not lines:
        return ""
    delays = [with_setting(setting[0].partition(" ")[0], setting) for setting in settings]
    return _with_notes(_markdown(["optimizer", "with", "no delay", *delays, "interval"], lines), counts(ablation))


def _family_lines(family: Family, settings: Sequence[Setting]) -> Iterator[list[str]]:
    seeds, half = len(family.best.losses), family.half_width
    interval = "" if half is None else f"± {half:.3f}"

    def text(gap: pd.Series | None) -> str:
        if gap is None:
            return ""
        if gap.empty:
            return f"{family.best.losses.mean():.3f}"
        return f"{gap.mean():+.3f}{_fewer(gap, seeds)}" if gap.count() else "diverged"

    for kind, gaps in family.gaps.items():
        yield [family.label, kind, *(text(gaps.get(setting)) for setting in (NO_DELAY, *settings)), interval]


def search_table(ablation: Ablation) -> str:
    """Return a table per optimizer of the loss of every learning rate on the search seed, the chosen one in bold."""
    parts, cells = [], Cells(ablation)
    for optimizer in dict.fromkeys(group.optimizer for group in ablation.groups):
        rows = sorted((row for row in ablation.results if row.optimizer == optimizer), key=ablation.order)
        lrs = sorted({lr for row in rows for lr in ablation.results[row].search})
        header = [*_group_header(ablation), "delay", "stages", "correction", *(f"lr {lr:g}" for lr in lrs)]
        found = [(row, cells.searched(row)) for row in rows]
        parts.append(_markdown(header, [_row_names(ablation, row) + [s.get(lr, "") for lr in lrs] for row, s in found]))
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[Ablation], str]] = {
    "main": main_table,
    "corrections": correction_table,
    "equal": equal_table,
    "sides": sides_table,
    "delays": delay_table,
    "search": search_table,
}
TITLES = {
    "main": "No delay, a delay of one update, and corrections",
    "corrections": "Corrections side by side",
    "equal": "At the same learning rate",
    "sides": "Both sides at their best",
    "delays": "Other delays",
    "search": "The search for the learning rate",
}
_MAIN_DEFINITION = (
    "Last validation loss (learning rate): mean over seeds, ± half of its 95 % interval (Student's t). Gap: async less"
    " sync, paired by seed. Recovered: (async - corrected) / (async - sync) for each seed; a gap whose interval holds 0"
    " is within noise."
)
_EQUAL_DEFINITION = (
    "Last validation loss on the seed of the search, all three at one learning rate: what a correction does where"
    " nothing else is changed. Bold: at the best learning rate of the column."
)
_DELAY_DEFINITION = (
    "Last validation loss (learning rate) and its difference to the same optimizer's sync run, paired by seed: mean, ±"
    " half of its 95 % interval (Student's t). Recovered: what a correction takes back of the gap at the same delay,"
    " and what a shorter delay, corrected or not, takes back of the gap of one update."
)
_SIDES_DEFINITION = (
    "The best loss without delay of an optimizer, alone or looking ahead, and the distance of all other rows to it,"
    " each at its best learning rate, paired by seed: mean. The 95 % interval is that of such a mean over all seeds,"
    " from the residual of all losses of the optimizer after row and seed (a randomised block design)."
)
_LENGTH_NOTE = (
    "Further updates: how many more the row takes than a sync run to the loss that it ends at. Losses at the ends of"
    " the sync runs of all lengths are joined by straight lines for it, against the logarithm of the length, and these"
    " are prolonged at both ends."
)
_DEFINITIONS = {
    "main": _MAIN_DEFINITION,
    "corrections": _MAIN_DEFINITION,
    "equal": _EQUAL_DEFINITION,
    "sides": _SIDES_DEFINITION,
    "delays": _DELAY_DEFINITION,
}


class Definitions:
    """Definitions of the columns, below the first table of a page that has them."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def below(self, kind: str, text: str) -> str:
        """The table, a kind of `TABLES`, and its definition if the page has not given it yet."""
        definition = _DEFINITIONS.get(kind)
        if not text or definition is None or definition in self._given:
            return text
        self._given.add(definition)
        return f"{text}\n\n{definition}"


def counts(ablation: Ablation) -> str:
    """Return a line with the numbers of runs, seeds and steps, and the length of a run."""
    runs = ablation.runs
    steps = sorted({run.steps for run in runs if not math.isnan(run.loss)})
    how_long = f"{'-'.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps" if steps else "none finished"
    seconds = pd.Series([run.seconds for run in runs]).median()
    seeds = sorted({run.key.seed for run in runs})
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    lost = sum(math.isnan(run.loss) for run in runs)
    return f"{len(runs)} runs ({lost} diverged), {which}, {how_long}, median {seconds:.1f} s of training per run."


def _group_header(ablation: Ablation) -> list[str]:
    return ["optimizer", *["momentum"] * _has(ablation, "momentum"), *["variant"] * _has(ablation, "variant")]


def _group_names(ablation: Ablation, group: Group) -> list[str]:
    momentum = "" if group.momentum is None else f"{group.momentum:g}"
    momenta, variants = [momentum] * _has(ablation, "momentum"), [group.variant or ""] * _has(ablation, "variant")
    return [group.optimizer, *momenta, *variants]


def _has(ablation: Ablation, name: str) -> bool:
    return any(getattr(group, name) is not None for group in ablation.groups)


def _row_names(ablation: Ablation, row: Row) -> list[str]:
    stages = "" if row.stages is None else str(row.stages)
    return [*_group_names(ablation, row.group), row.delay, stages, row.correction]


def _corrections_of_one_update(ablation: Ablation) -> list[str]:
    run = {row.correction for row in ablation.results if row.setting == ablation.one_update}
    return [name for name in ablation.corrections if name in run]


def _with_notes(table: str, *notes: str) -> str:
    """Return a table, and below it the meaning of its signs, and further notes."""
    marks = [text for mark, text in _NOTES.items() if re.search(rf" {mark}[ )]", table)]
    return "\n\n".join([table, " ".join([*marks, *notes])]).rstrip()


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
