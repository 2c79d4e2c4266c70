"""What the runs of an ablation show: each row's learning rate and losses, gaps, and the shares of them recovered.

A quantity over seeds is a series by seed, NaN where a run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from research.ablations.rows import UNCORRECTED, Group, Row, Run, Setting, natural
from research.ablations.search import best_lr

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; for more the last one, which is a little wide.
_STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_MOST_OF_A_GAP = 10  # a correction that does more, up or down, does something else than to close the gap
NO_DELAY: Setting = ("0", None)


@dataclass(frozen=True)
class Result:
    """Losses of a row, and its search of the learning rate.

    Attributes:
        row: which.
        search: learning rate to loss on the search seed, ascending; NaN where the run diverged.
        trainings: learning rate to the name of that run, which rows share that train the same.
        lr: the chosen learning rate; None if several were tried and all diverged.
        losses: at ``lr``, by seed.
        cells: names of these runs that did not diverge.
    """

    row: Row
    search: Mapping[float, float]
    trainings: Mapping[float, str]
    lr: float | None
    losses: pd.Series
    cells: list[str]

    @classmethod
    def of(cls, row: Row, runs: list[Run]) -> Result:
        """Choose the learning rate on the seed that has the most of them, the lowest of such seeds."""
        seeds = pd.Series([run.key.seed for run in runs]).value_counts()
        seed = seeds[seeds == seeds.max()].index.min()
        tried = sorted((run for run in runs if run.key.seed == seed), key=lambda run: run.key.lr)
        search, trainings = {run.key.lr: run.loss for run in tried}, {run.key.lr: run.cell for run in tried}
        lr = best_lr(search) if len(search) > 1 else next(iter(search))
        chosen = sorted((run for run in runs if run.key.lr == lr), key=lambda run: run.key.seed)
        losses = pd.Series({run.key.seed: run.loss for run in chosen}, dtype=float)
        return cls(row, search, trainings, lr, losses, [run.cell for run in chosen if not math.isnan(run.loss)])

    @property
    def searched(self) -> bool:
        """Whether more than one learning rate was tried."""
        return len(self.search) > 1

    @property
    def at_edge(self) -> bool:
        """Whether the lowest or the highest of several learning rates was chosen."""
        return self.searched and self.lr in (min(self.search), max(self.search))


@dataclass(frozen=True)
class Ablation:
    """All results of one grid, in the order in which its names first appear."""

    name: str
    runs: list[Run]
    results: Mapping[Row, Result]

    @classmethod
    def of(cls, name: str, runs: Iterable[Run]) -> Ablation:
        """Sort runs into rows; of two runs of one training the last one counts."""
        runs = list({run.key: run for run in runs}.values())
        rows: dict[Row, list[Run]] = {}
        for run in runs:
            rows.setdefault(run.key.row, []).append(run)
        return cls(name, runs, {row: Result.of(row, ones) for row, ones in rows.items()})

    @cached_property
    def groups(self) -> list[Group]:
        """Optimizers in order of appearance, each with its momenta and variants ascending."""
        optimizers = list(dict.fromkeys(row.optimizer for row in self.results))
        return sorted(
            {row.group for row in self.results},
            key=lambda group: (optimizers.index(group.optimizer), group.momentum or 0.0, natural(group.variant or "")),
        )

    @cached_property
    def corrections(self) -> list[str]:
        """Names of the corrections, in order of appearance."""
        return [name for name in dict.fromkeys(row.correction for row in self.results) if name != UNCORRECTED]

    @cached_property
    def one_update(self) -> Setting:
        """Return the delay of one update: without further settings, or the only one there is."""
        settings = {row.setting for row in self.results if row.kind == "1"}
        return settings.pop() if len(settings) == 1 else ("1", None)

    def order(self, row: Row) -> tuple:
        """Sort key of rows: groups and corrections as above, delays as numbers before words."""
        corrections = [UNCORRECTED, *self.corrections]
        return self.groups.index(row.group), natural(row.delay), row.stages or 0, corrections.index(row.correction)

    def sync(self, group: Group) -> Result | None:
        """The group's run without delay."""
        return self.results.get(Row(*group, *NO_DELAY, UNCORRECTED))

    def delayed(self, group: Group, correction: str = UNCORRECTED) -> Result | None:
        """The group's result at a delay of one update."""
        return self.results.get(Row(*group, *self.one_update, correction))

    def uncorrected_row(self, row: Row) -> Row:
        """Return the delayed row part of whose gap this one takes back; itself if it is not corrected.

        For the least staleness, corrected or not, that is the delay of one update.
        """
        setting = self.one_update if row.kind == "least" else row.setting
        return Row(*row.group, *setting, UNCORRECTED)

    def gap(self, row: Row) -> pd.Series | None:
        """Loss of a row less that of its group's run without delay; None where no seed has both."""
        sync = self.sync(row.group)
        gap = None if sync is None else difference(self.results[row], sync)
        return gap if gap is not None and len(gap) else None


def difference(worse: Result, better: Result) -> pd.Series:
    """Return the loss of ``worse`` less that of ``better``, paired by seed over the seeds that both have."""
    shared = worse.losses.index.intersection(better.losses.index)
    return (worse.losses[shared] - better.losses[shared]).sort_index()


def half_width(values: pd.Series) -> float | None:
    """Return half of the 95 % interval of the mean, by Student's t; None with fewer than two values."""
    count = int(values.count())
    if count < 2:
        return None
    return _half(count - 1, values.std() / math.sqrt(count))


def common_half_width(rows: Sequence[pd.Series]) -> float | None:
    """Return half of the 95 % interval of the difference of two rows' mean losses over the same seeds.

    A loss is taken as a row's mean, plus what its seed adds to every row, plus an error; all errors have one variance,
    that of a randomised block design. Rows that lack a seed do not count.

    Returns:
        None with fewer than two rows or seeds.
    """
    losses = pd.DataFrame(list(rows)).dropna()  # (rows, seeds)
    freedom = (len(losses) - 1) * (losses.shape[1] - 1)
    if freedom < 1:
        return None
    errors = losses.sub(losses.mean(axis=1), axis=0) - losses.mean() + losses.to_numpy().mean()
    variance = errors.pow(2).to_numpy().sum() / freedom
    return _half(freedom, math.sqrt(2 * variance / losses.shape[1]))


def pooled_half_width(many: Sequence[pd.Series], count: int) -> float | None:
    """Return half of the 95 % interval of a mean of ``count`` values, for independent series of one variance.

    Returns:
        None if no series has two values.
    """
    many = [values.dropna() for values in many if values.count() > 1]
    freedom = sum(len(values) - 1 for values in many)
    if not freedom:
        return None
    variance = sum((len(values) - 1) * values.var() for values in many) / freedom
    return _half(freedom, math.sqrt(variance / count))


def _half(freedom: int, error: float) -> float:
    """Return half of a 95 % interval from the standard error of a mean and its degrees of freedom."""
    return _STUDENT_T[min(freedom, len(_STUDENT_T)) - 1] * float(error)


def no_share(gap: pd.Series, gain: float = 0.0) -> str | None:
    """Return why a share of a gap would mean nothing; None if it means something.

    A gap whose 95 % interval contains 0, or whose sign differs between seeds, is within noise. With one seed there is
    no interval to judge by.

    Args:
        gap: between no delay and delay.
        gain: the most that a correction changes, up or down. Ten times the gap and more is no share of it.
    """
    if not gap.count():
        return "a run diverged" if len(gap) else "no shared seed"
    if abs(gap.mean()) < (half_width(gap) or 0.0):
        return "gap within noise"
    if gap.mean() <= 0 or gap.mean() * _MOST_OF_A_GAP < gain:
        return "no gap"
    return None if gap.min() > 0 else "gap within noise"


def share_recovered(sync: Result, delayed: Result, corrected: Result) -> pd.Series | str:
    """Return the share (delayed - corrected) / (delayed - sync) of each seed with all three, or why there is none."""
    gap, gain = difference(delayed, sync), difference(delayed, corrected)
    both = pd.concat({"gap": gap, "gain": gain}, axis=1, join="inner")
    if both.dropna().empty:
        return "a run diverged" if len(both) else "no shared seed"
    return no_share(gap, both.dropna().gain.abs().max()) or both.gain / both.gap
