"""What the runs of an ablation say: rows of the grid, each one's learning rate, gaps and the shares recovered.

Pure functions over a list of :class:`Run`; nothing here reads, writes or formats.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

UNCORRECTED = "none"


@dataclass(frozen=True)
class Run:
    """One training: a line of ``results.csv``.

    Attributes:
        table: name of the ablation.
        optimizer, correction: names from its recipe.
        delay: ``"0"``, ``"1"``, ``"pipedream"``, ..., further settings appended as ``key=value``.
        stages: of an emulated pipeline; None where the delay does not depend on it.
        momentum: None unless it is swept.
        lr: learning rate.
        seed: of weights and data order.
        loss: last validation loss; None if the run diverged.
        steps: updates made.
        seconds: duration of the training.
        cell: name of the run's folder and of its curves.
    """

    table: str
    optimizer: str
    correction: str
    delay: str
    stages: int | None
    momentum: float | None
    lr: float
    seed: int
    loss: float | None
    steps: int
    seconds: float
    cell: str

    @property
    def row(self) -> Row:
        """The row of the grid that this run belongs to."""
        return Row(Group(self.optimizer, self.momentum), self.delay, self.stages, self.correction)


@dataclass(frozen=True)
class Group:
    """What is compared within itself: an optimizer, at one momentum where that is swept."""

    optimizer: str
    momentum: float | None

    @property
    def label(self) -> str:
        """Its name in plots."""
        return self.optimizer if self.momentum is None else f"{self.optimizer}, momentum {self.momentum:g}"


@dataclass(frozen=True)
class Row:
    """A row of the grid: all that is fixed while learning rates and seeds vary."""

    group: Group
    delay: str
    stages: int | None
    correction: str

    @property
    def kind(self) -> str:
        """The delay without further settings."""
        return re.split(r"[\s,;]", self.delay, maxsplit=1)[0]


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
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None with fewer than two values."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Result:
    """What a row came to.

    Attributes:
        row: which.
        search: learning rate to loss on the search seed, ascending; None where the run diverged.
        lr: the chosen learning rate; None if several were tried and all diverged.
        runs: all seeds at ``lr``, by seed; all runs of the search if ``lr`` is None.
    """

    row: Row
    search: Mapping[float, float | None]
    lr: float | None
    runs: Sequence[Run]

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
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the lowest or the highest of several that were tried."""
        return len(self.search) > 1 and self.lr in (min(self.search), max(self.search))

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
    """

    runs: Sequence[Run]
    results: Mapping[Row, Result]

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Ablation:
        """Sort runs into rows and choose each row's learning rate."""
        runs = list(runs)
        rows: dict[Row, list[Run]] = {}
        for run in runs:
            rows.setdefault(run.row, []).append(run)
        return cls(runs, {row: _result(row, members) for row, members in rows.items()})

    @property
    def groups(self) -> list[Group]:
        """Optimizers in order of appearance, each with its momenta ascending."""
        optimizers = list(dict.fromkeys(row.group.optimizer for row in self.results))
        groups = {row.group for row in self.results}
        return sorted(groups, key=lambda g: (optimizers.index(g.optimizer), g.momentum is not None, g.momentum or 0.0))

    @property
    def corrections(self) -> list[str]:
        """Names of the corrections without "none", in order of appearance."""
        return [name for name in dict.fromkeys(row.correction for row in self.results) if name != UNCORRECTED]

    @property
    def swept_momentum(self) -> bool:
        """Whether any optimizer was run at several momenta."""
        return any(group.momentum is not None for group in self.groups)

    def sync(self, group: Group) -> Result | None:
        """The group's run without delay; None if it is not there yet."""
        return self.constant(group, "0", UNCORRECTED)

    def gap(self, row: Row) -> Spread | None:
        """Loss of a row less that of its group's run without delay; None where no seed has both."""
        sync = self.sync(row.group)
        gap = None if sync is None else difference(self.results[row], sync)
        return gap if gap is not None and (gap.values or gap.diverged) else None

    def constant(self, group: Group, delay: str, correction: str) -> Result | None:
        """The group's result at the same delay on all stages; None if it is not there yet."""
        return self.results.get(Row(group, *self.setting(delay), correction))

    def setting(self, delay: str) -> tuple[str, int | None]:
        """Text and stages of the rows that stand for a constant delay: without further settings, or the only ones."""
        settings = {(row.delay, row.stages) for row in self.results if row.kind == delay}
        return next(iter(settings)) if len(settings) == 1 else (delay, None)


def difference(worse: Result, better: Result) -> Spread:
    """Loss of ``worse`` less that of ``better``, paired by seed over the seeds that both have."""
    first, second = worse.loss.values, better.loss.values
    shared = _seeds(worse) & _seeds(better)
    values = {seed: first[seed] - second[seed] for seed in sorted(shared) if seed in first and seed in second}
    return Spread(values, len(shared) - len(values))


def share_recovered(sync: Result, delayed: Result, corrected: Result) -> Share:
    """Share (delayed - corrected) / (delayed - sync), computed for each seed that all three have.

    A gap whose mean is smaller than twice its sample standard deviation over the seeds, or whose sign differs
    between seeds, is within noise and has no share. With one seed there is no spread to judge by.
    """
    gap, gain = difference(delayed, sync), difference(delayed, corrected)
    seeds = [seed for seed in gap.values if seed in gain.values]
    shared = _seeds(sync) & _seeds(delayed) & _seeds(corrected)
    if not seeds:
        return Share(Verdict.DIVERGED if shared else Verdict.NOT_SHARED, Spread({}, len(shared)))
    verdict = judge(gap)
    if verdict is not Verdict.RECOVERED:
        return Share(verdict, Spread({}, len(shared) - len(seeds)))
    shares = {seed: gain.values[seed] / gap.values[seed] for seed in seeds}
    return Share(verdict, Spread(shares, len(shared) - len(seeds)))


def judge(gap: Spread) -> Verdict:
    """Whether a gap is large enough, against its spread over seeds, for a share of it to mean anything."""
    if gap.mean is None:
        return Verdict.DIVERGED if gap.diverged else Verdict.NOT_SHARED
    if abs(gap.mean) < 2 * (gap.std or 0.0):
        return Verdict.WITHIN_NOISE
    if gap.mean <= 0:
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


def _result(row: Row, runs: Sequence[Run]) -> Result:
    seed = _search_seed(runs)
    search = {run.lr: run.loss for run in sorted(runs, key=lambda run: run.lr) if run.seed == seed}
    lr = _best_lr(search)
    chosen = [run for run in runs if run.seed == seed] if lr is None else [run for run in runs if run.lr == lr]
    return Result(row, search, lr, sorted(chosen, key=lambda run: (run.seed, run.lr)))


def _search_seed(runs: Sequence[Run]) -> int:
    """The seed with the most learning rates, the lowest if several have as many."""
    lrs: dict[int, set[float]] = {}
    for run in runs:
        lrs.setdefault(run.seed, set()).add(run.lr)
    return min(lrs, key=lambda seed: (-len(lrs[seed]), seed))


def _best_lr(search: Mapping[float, float | None]) -> float | None:
    """The learning rate with the lowest loss, the lower one of equals; the only one if there is one only."""
    if len(search) == 1:
        return next(iter(search))
    finished = [(loss, lr) for lr, loss in search.items() if loss is not None]
    return min(finished)[1] if finished else None


def _seeds(result: Result) -> set[int]:
    return {run.seed for run in result.runs}
