"""What the runs of an ablation say: each row's learning rate, gaps and the shares recovered.

Pure functions over lists of :class:`Run` and :class:`Open`; nothing here reads, writes or formats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_asyncpp.tools.ablation.grid import (
    UNCORRECTED,
    Group,
    Open,
    Row,
    Run,
    Setting,
    kind_of,
    natural,
    without_start,
)
from lightning_asyncpp.tools.ablation.recipe.rows import best_lr

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; for more the last one, which is a little wide.
_STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_MOST_OF_A_GAP = 10  # a correction that does more, up or down, does something else than to close the gap


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds.

    Attributes:
        values: by seed, of the seeds whose runs all finished.
        diverged: number of seeds where a run diverged; they have no value.
    """

    values: Mapping[int, float]
    diverged: int = 0

    @property
    def mean(self) -> float | None:
        """None without values."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval of the mean, by Student's t; None with fewer than two values."""
        count = len(self.values)
        if count < 2:
            return None
        return (
            _STUDENT_T[min(count - 1, len(_STUDENT_T)) - 1] * statistics.stdev(self.values.values()) / math.sqrt(count)
        )


@dataclass(frozen=True)
class Result:
    """What a row came to.

    Attributes:
        row: which.
        search: learning rate to loss on the search seed, ascending; None where the run diverged.
        lr: the chosen learning rate; None if several were tried and all diverged.
        runs: all seeds at ``lr``, by seed; all runs of the search if ``lr`` is None.
        open: trainings of the row that have no result.
    """

    row: Row
    search: Mapping[float, float | None]
    lr: float | None
    runs: Sequence[Run]
    open: Sequence[Open] = ()

    @property
    def loss(self) -> Spread:
        """Last validation loss at the chosen learning rate."""
        values = {run.seed: run.loss for run in self.runs if run.loss is not None}
        return Spread(values, len({run.seed for run in self.runs if run.loss is None}))

    @property
    def best(self) -> float | None:
        """Loss on the search seed at the chosen learning rate; None if that diverged."""
        return None if self.lr is None else self.search[self.lr]

    @property
    def search_over(self) -> bool:
        """Whether no learning rate is left to be tried, so that the chosen one will not change."""
        return all(one.lr == self.lr for one in self.open)

    @property
    def at_edge(self) -> bool:
        """Whether the search is over and chose the lowest or the highest of several learning rates."""
        return self.search_over and self.searched and self.lr in (min(self.search), max(self.search))

    @property
    def searched(self) -> bool:
        """Whether more than one learning rate was tried."""
        return len(self.search) > 1


class Verdict(Enum):
    """What can be said of the share of a gap that a correction recovers."""

    RECOVERED = "recovered"
    WITHIN_NOISE = "gap within noise"
    NO_GAP = "no gap"
    DIVERGED = "a run diverged"
    NOT_SHARED = "no shared seed"


@dataclass(frozen=True)
class Share:
    """Share of the gap between no delay and delay that a correction recovers; 1 is all of it.

    ``spread`` holds one share per seed, and is empty unless the verdict is ``RECOVERED``.
    """

    verdict: Verdict
    spread: Spread


@dataclass(frozen=True)
class Ablation:
    """All results of one grid, in the order in which its names first appear.

    Attributes:
        runs: every run.
        results: row to result.
        open: trainings of the recipe that have no result.
    """

    runs: Sequence[Run]
    results: Mapping[Row, Result]
    open: Sequence[Open] = ()

    @classmethod
    def of(cls, runs: Iterable[Run], left: Iterable[Open] = ()) -> Ablation:
        """Sort runs into rows and choose each row's learning rate; ``left`` has no result yet, or never will."""
        runs = list(runs)
        known = {(run.row, run.lr, run.seed) for run in runs}
        left = [one for one in left if (one.row, one.lr, one.seed) not in known]
        rows: dict[Row, list[Run]] = {}
        for run in runs:
            rows.setdefault(run.row, []).append(run)
        unfinished = _by_row(left)
        return cls(runs, {row: _result(row, ones, unfinished.get(row, [])) for row, ones in rows.items()}, left)

    @cached_property
    def unfinished(self) -> dict[Row, list[Open]]:
        """Rows of which trainings have no result, and these."""
        return _by_row(self.open)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows that have a result, and those that only wait for one."""
        return list(dict.fromkeys([*self.results, *self.unfinished]))

    @cached_property
    def groups(self) -> list[Group]:
        """Optimizers in order of appearance, each with its momenta ascending, each with its variants."""
        optimizers = list(dict.fromkeys(row.group.optimizer for row in self.rows))

        def place(group: Group) -> tuple[int, bool, float, list[tuple[bool, int, str]]]:
            momentum = group.momentum
            order = natural(group.variant or "")
            return optimizers.index(group.optimizer), momentum is not None, momentum or 0.0, order

        return sorted({row.group for row in self.rows}, key=place)

    @cached_property
    def corrections(self) -> list[str]:
        """Names of the corrections without "none", in order of appearance."""
        return [name for name in dict.fromkeys(row.correction for row in self.rows) if name != UNCORRECTED]

    @property
    def swept_momentum(self) -> bool:
        """Whether any optimizer was run at several momenta."""
        return any(group.momentum is not None for group in self.groups)

    @property
    def has_variants(self) -> bool:
        """Whether the base recipe was varied."""
        return any(group.variant is not None for group in self.groups)

    @cached_property
    def one_update(self) -> Setting:
        """What stands for a delay of one update: that without further settings, or the only one there is."""
        return self._standing_for("1")

    @cached_property
    def no_delay(self) -> Setting:
        """What stands for no delay: that with the further settings of :attr:`one_update`, where there is one."""
        return self._twin(self.one_update, "0")

    def sync(self, group: Group) -> Result | None:
        """The group's run without delay; None if it is not there yet."""
        return self.results.get(Row(group, *self.no_delay, UNCORRECTED))

    def delayed(self, group: Group, correction: str = UNCORRECTED) -> Result | None:
        """The group's result at a delay of one update; None if it is not there yet."""
        return self.results.get(Row(group, *self.one_update, correction))

    def sync_row(self, row: Row) -> Row:
        """The row without delay that another is compared with: of the same further settings, where there is one."""
        setting = self.no_delay if row.kind == "0" else self._twin(row.setting, "0")
        return Row(row.group, *setting, UNCORRECTED)

    def uncorrected_row(self, row: Row) -> Row:
        """The delayed row whose gap this one takes something back of; itself if it is not corrected.

        For a fresh last stage and the least staleness, corrected or not, that is the delay of one update; for a
        synchronous start, corrected or not, the same delay without it, where there is one.
        """
        setting = without_start(row.delay), row.stages
        if row.kind in ("fresh_last_stage", "least"):
            setting = self._twin(setting, "1")
        elif setting not in self._settings:
            setting = row.setting
        return Row(row.group, *setting, UNCORRECTED)

    def gap(self, row: Row) -> Spread | None:
        """Loss of a row less that of its group's run without delay; None where no seed has both."""
        sync = self.results.get(self.sync_row(row))
        gap = None if sync is None else difference(self.results[row], sync)
        return gap if gap is not None and (gap.values or gap.diverged) else None

    @cached_property
    def _settings(self) -> set[Setting]:
        return {row.setting for row in self.rows}

    def _standing_for(self, delay: str) -> Setting:
        settings = [setting for setting in self._settings if kind_of(setting[0]) == delay]
        return settings[0] if len(settings) == 1 else (delay, None)

    def _twin(self, setting: Setting, delay: str) -> Setting:
        """The constant delay of the same further settings, if there is one; else what stands for that delay."""
        text = delay + setting[0].removeprefix(kind_of(setting[0]))
        equal = [twin for twin in ((text, setting[1]), (text, None)) if twin in self._settings]
        return equal[0] if equal else self._standing_for(delay)


def difference(worse: Result, better: Result) -> Spread:
    """Loss of ``worse`` less that of ``better``, paired by seed over the seeds that both have."""
    first, second = worse.loss.values, better.loss.values
    shared = _seeds(worse) & _seeds(better)
    values = {seed: first[seed] - second[seed] for seed in sorted(shared) if seed in first and seed in second}
    return Spread(values, len(shared) - len(values))


def share_recovered(sync: Result, delayed: Result, corrected: Result) -> Share:
    """Share (delayed - corrected) / (delayed - sync), computed for each seed that all three have.

    A gap whose 95 % interval holds 0, or whose sign differs between seeds, is within noise and has no share. With one
    seed there is no interval to judge by.
    """
    gap, gain = difference(delayed, sync), difference(delayed, corrected)
    seeds = [seed for seed in gap.values if seed in gain.values]
    shared = _seeds(sync) & _seeds(delayed) & _seeds(corrected)
    if not seeds:
        return Share(Verdict.DIVERGED if shared else Verdict.NOT_SHARED, Spread({}, len(shared)))
    verdict = judge(gap, max(map(abs, gain.values.values())))
    if verdict is not Verdict.RECOVERED:
        return Share(verdict, Spread({}, len(shared) - len(seeds)))
    shares = {seed: gain.values[seed] / gap.values[seed] for seed in seeds}
    return Share(verdict, Spread(shares, len(shared) - len(seeds)))


def judge(gap: Spread, gain: float = 0.0) -> Verdict:
    """Whether a gap is large enough, against its spread over seeds, for a share of it to mean anything.

    Args:
        gap: between no delay and delay.
        gain: the most that a correction changes, up or down. Ten times the gap and more is no share of it.
    """
    if gap.mean is None:
        return Verdict.DIVERGED if gap.diverged else Verdict.NOT_SHARED
    if abs(gap.mean) < (gap.half_width or 0.0):
        return Verdict.WITHIN_NOISE
    if gap.mean <= 0 or gap.mean * _MOST_OF_A_GAP < gain:
        return Verdict.NO_GAP
    return Verdict.RECOVERED if min(gap.values.values()) > 0 else Verdict.WITHIN_NOISE


def band(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float, float, float]]:
    """Mean, minimum and maximum of several curves at the steps that all of them have.

    Args:
        curves: each a list of (step, value); values that are not finite are left out.

    Returns:
        (step, mean, minimum, maximum), by step.
    """
    finite = [{step: value for step, value in curve if math.isfinite(value)} for curve in curves]
    steps = sorted(set.intersection(*map(set, finite))) if finite else []
    at = {step: [curve[step] for curve in finite] for step in steps}
    return [(step, statistics.fmean(at[step]), min(at[step]), max(at[step])) for step in steps]


def _by_row(left: Iterable[Open]) -> dict[Row, list[Open]]:
    rows: dict[Row, list[Open]] = {}
    for one in left:
        rows.setdefault(one.row, []).append(one)
    return rows


def _result(row: Row, runs: Sequence[Run], left: Sequence[Open]) -> Result:
    seed = _search_seed(runs)
    search = {run.lr: run.loss for run in sorted(runs, key=lambda run: run.lr) if run.seed == seed}
    lr = best_lr(search) if len(search) > 1 else next(iter(search))  # a single one is used even if this seed diverged
    chosen = [run for run in runs if run.seed == seed] if lr is None else [run for run in runs if run.lr == lr]
    return Result(row, search, lr, sorted(chosen, key=lambda run: (run.seed, run.lr)), left)


def _search_seed(runs: Sequence[Run]) -> int:
    """The seed with the most learning rates, the lowest if several have as many."""
    lrs: dict[int, set[float]] = {}
    for run in runs:
        lrs.setdefault(run.seed, set()).add(run.lr)
    return min(lrs, key=lambda seed: (-len(lrs[seed]), seed))


def _seeds(result: Result) -> set[int]:
    return {run.seed for run in result.runs}
