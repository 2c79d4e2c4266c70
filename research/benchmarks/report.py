"""Tables of the measurements: medians with the range over repeats, gains paired within a repeat."""

from __future__ import annotations

import csv
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import lightning as L
import torch

from lightning_asyncpp.core.trace import utilisation
from research.benchmarks.run import RankRun, Run


class Spread(NamedTuple):
    """A quantity over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Make one from measured values."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """Return its text for a table."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}-{self.high:.{digits}f}]"

    def percent(self) -> str:
        """Return the text of a difference in per cent for a table."""
        return f"{self.median:+.1%} [{self.low:+.1%} to {self.high:+.1%}]"


@dataclass
class Figures:
    """Measurements of a system, one number per repeat.

    Attributes:
        milliseconds: per mini-batch in the steady state, without warm-up and the last mini-batch; of the slowest rank.
        processor: milliseconds of processor time per microbatch in it, all threads, the mean over ranks.
        utilisation: share of that time inside forwards and backwards, on the busiest stage; empty if not recorded.
        losses: of the last mini-batch, the mean over replicas; empty where none is computed.
    """

    milliseconds: list[float]
    processor: list[float]
    utilisation: list[float]
    losses: list[float]

    @classmethod
    def of(cls, run: Run, repeats: Sequence[Sequence[RankRun]]) -> Figures:
        """Make one from all repeats of a system."""
        first, last = run.warm_up - 1, run.warm_up - 1 + run.mini_batches
        figures = cls([], [], [], [])
        for ranks in repeats:
            seconds = max(rank.clock.marks[last] - rank.clock.marks[first] for rank in ranks)
            figures.milliseconds.append(seconds / run.mini_batches * 1e3)
            busy = statistics.fmean(rank.clock.processor[last] - rank.clock.processor[first] for rank in ranks)
            figures.processor.append(busy / run.mini_batches / run.microbatches * 1e3)
            if all(rank.spans for rank in ranks):
                shares = [utilisation(rank.spans, rank.clock.marks[first], rank.clock.marks[last]) for rank in ranks]
                figures.utilisation.append(max(shares))
            if losses := [rank.loss for rank in ranks if rank.loss is not None]:
                figures.losses.append(statistics.fmean(losses))
        return figures


def print_comparison(run: Run, measured: dict[str, list[list[RankRun]]]) -> None:
    """Print the table, and write the figures of every repeat into a file if one is given."""
    figures = {system: Figures.of(run, repeats) for system, repeats in measured.items()}
    titles = ["system", "ms per mini-batch", "utilisation", "gain over 1F1B", "over sync", "of the floor",
              "time over async", "processor ms per microbatch", "loss"]  # fmt: skip
    print_table(titles, [_row(system, figures) for system in figures])
    print(describe_machine())
    if run.csv:
        with open(run.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["system", "repeat", "milliseconds", "processor", "utilisation", "loss"])
            for system, own in figures.items():
                columns = zip_longest(own.milliseconds, own.processor, own.utilisation, own.losses)
                writer.writerows([system, repeat, *row] for repeat, row in enumerate(columns))


def _row(system: str, figures: dict[str, Figures]) -> list[str]:
    own = figures[system]
    of_floor, gain, over_sync = (_ratios(figures, base, system) for base in ("floor", "1f1b", "sync"))
    longer = [1 / ratio - 1 for ratio in _ratios(figures, "async", system)] if system.startswith("async+") else []
    return [
        system,
        Spread.of(own.milliseconds).text(1),
        Spread.of(own.utilisation).text(3) if own.utilisation else "",
        Spread.of(gain).text(2) if gain else "",
        Spread.of(over_sync).text(2) if over_sync else "",
        Spread.of(of_floor).text(3) if of_floor else "",
        Spread.of(longer).percent() if longer else "",
        Spread.of(own.processor).text(2),
        Spread.of(own.losses).text(4) if own.losses else "",
    ]


def _ratios(figures: dict[str, Figures], base: str, system: str) -> list[float]:
    """Return the time of ``base`` over a system's, of each repeat; none if ``base`` did not run."""
    if base not in figures:
        return []
    return [b / own for b, own in zip(figures[base].milliseconds, figures[system].milliseconds, strict=True)]


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table without its empty columns."""
    shown = [column for column in range(len(titles)) if any(row[column] for row in rows)]
    for row in (titles, ["---"] * len(titles), *rows):
        print("| " + " | ".join(row[column] for column in shown) + " |")


def describe_machine() -> str:
    """Return the versions and hardware that the figures depend on."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}"
    return f"{os.cpu_count()} cores, {platform.platform()}, {versions}"
