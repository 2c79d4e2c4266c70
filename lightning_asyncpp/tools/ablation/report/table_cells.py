"""The cells of an ablation's tables: losses, gaps and shares as text, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lightning_asyncpp.tools.ablation.grid import Row
from lightning_asyncpp.tools.ablation.report.lengths import further_updates
from lightning_asyncpp.tools.ablation.report.summary import (
    Ablation,
    Result,
    Spread,
    Verdict,
    difference,
    judge,
    share_recovered,
)

NOT_RUN, FAILED = "not run yet", "failed"
EDGE, ONE_LR, UNFINISHED = "†", "‡", "§"
_FEWEST_DECIMALS, _MOST_DECIMALS = 3, 8
_SAME = 1e-6  # relative difference of losses below which they are equal in single precision


@dataclass(frozen=True)
class Cells:
    """Makes the cells of one ablation, all with the same number of decimals.

    A row that is asked for and has no result says so; where the recipe does not ask for it, the cell is empty.
    """

    ablation: Ablation

    @cached_property
    def decimals(self) -> int:
        """Enough for two digits of the smallest loss and of the smallest gap that is one; at least 3, at most 8."""
        return decimals(self.ablation)

    @cached_property
    def seeds(self) -> int:
        """How many seeds the whole ablation has."""
        runs, left = self.ablation.runs, self.ablation.open
        return len({run.seed for run in runs} | {one.seed for one in left if one.seed is not None})

    def number(self, loss: float) -> str:
        """A loss."""
        return f"{loss:.{self.decimals}f}"

    def loss(self, row: Row) -> str:
        """Loss and learning rate of a row, its diverged seeds named; and how many seeds, if others have more."""
        result = self.ablation.results.get(row)
        if result is None:
            return self._missing([row])
        if result.lr is None:
            return f"diverged at all {len(result.search)} lrs{self.mark(row)}"
        lr, loss, total = f"({result.lr:g}{_search_mark(result)}{self.mark(row)})", result.loss, len(result.runs)
        if not loss.values:
            return f"{loss.diverged} of {total} diverged {lr}"
        if loss.diverged:
            return f"{loss.diverged} of {total} diverged, else {self._spread(loss)} {lr}"
        return f"{self._spread(loss)} {lr}{_fewer(loss, self.seeds)}"

    def gap(self, row: Row) -> str:
        """Difference to the run without delay, paired by seed."""
        sync = self.ablation.sync_row(row)
        first, second = (self.ablation.results.get(one) for one in (row, sync))
        if first is None or second is None:
            return self._missing([row, sync])
        gap = difference(first, second)
        if gap.mean is None:
            return judge(gap).value + self.mark(row, sync)
        return self._spread(gap, "+") + _fewer(gap, len(first.runs)) + self.mark(row, sync)

    def share(self, row: Row) -> str:
        """Share of the gap that a row recovers, in per cent, or why there is none; empty for an uncorrected row."""
        delayed = self.ablation.uncorrected_row(row)
        if delayed == row:
            return ""
        rows = [self.ablation.sync_row(delayed), delayed, row]
        first, second, third = (self.ablation.results.get(one) for one in rows)
        if first is None or second is None or third is None:
            return self._missing(rows)
        share = share_recovered(first, second, third)
        if share.verdict is not Verdict.RECOVERED or share.spread.mean is None:
            return share.verdict.value + self.mark(*rows)
        return f"{self._per_cent(share.spread)}{_fewer(share.spread, len(third.runs))}{self.mark(*rows)}"

    def further_updates(self, row: Row) -> str:
        """How many more updates it takes to the same loss without delay, in per cent; empty where that is not known."""
        further = further_updates(self.ablation, row)
        return "" if further is None else self._per_cent(further, "+")

    def _per_cent(self, spread: Spread, sign: str = "") -> str:
        half = "" if spread.half_width is None else f" ± {per_cent(spread.half_width)}"
        return f"{per_cent(spread.mean or 0.0):{sign}}{half} %"

    def mark(self, *rows: Row) -> str:
        """The sign of rows that are not finished, if one of these is not."""
        return f" {UNFINISHED}" if any(row in self.ablation.unfinished for row in rows) else ""

    def searched(self, row: Row) -> dict[float, str]:
        """The search of a row: loss by learning rate on its seed, the chosen one in bold; also what is not over."""
        cells: dict[float, str] = {}
        for one in self.ablation.unfinished.get(row, ()):
            if one.lr is not None:
                cells[one.lr] = FAILED if one.failed else NOT_RUN
        result = self.ablation.results.get(row)
        for lr, loss in result.search.items() if result else ():
            cells[lr] = "diverged" if loss is None else self.number(loss)
        if result is not None and result.lr is not None and result.search_over:
            cells[result.lr] = f"**{cells[result.lr]}**"
        return cells

    def _missing(self, rows: Iterable[Row]) -> str:
        """Why there is no value: something failed, or is still to be run; nothing if it is not asked for."""
        without = [row for row in rows if row not in self.ablation.results]
        if any(row not in self.ablation.unfinished for row in without):
            return ""
        return FAILED if any(one.failed for row in without for one in self.ablation.unfinished[row]) else NOT_RUN

    def _spread(self, spread: Spread, sign: str = "") -> str:
        half = "" if spread.half_width is None else f" ± {self.number(spread.half_width)}"
        return f"{spread.mean:{sign}.{self.decimals}f}{half}"


def decimals(ablation: Ablation) -> int:
    """Decimals of losses and gaps: see :attr:`Cells.decimals`."""
    smallest = []
    for row, result in ablation.results.items():
        loss, gap = result.loss.mean, ablation.gap(row)
        if loss:
            smallest.append(abs(loss))
        if loss and gap and judge(gap) is not Verdict.WITHIN_NOISE and abs(gap.mean or 0.0) > _SAME * abs(loss):
            smallest.append(abs(gap.mean or 0.0))
    exponent = int(f"{min(smallest, default=1.0):.1e}".split("e")[1])
    return min(max(1 - exponent, _FEWEST_DECIMALS), _MOST_DECIMALS)


def per_cent(share: float) -> int:
    """A share as a whole number, which has no -0."""
    return round(100 * share)


def _search_mark(result: Result) -> str:
    if not result.search_over or (result.searched and not result.at_edge):
        return ""
    return f" {EDGE}" if result.at_edge else f" {ONE_LR}"


def _fewer(spread: Spread, total: int) -> str:
    """How many seeds have a value, where that is not all of ``total``."""
    count = len(spread.values)
    if spread.diverged:
        return f", {spread.diverged} of {count + spread.diverged} diverged"
    return f", {count} seed{'s' if count > 1 else ''}" if count < total else ""
