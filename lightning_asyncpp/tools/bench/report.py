"""From what the processes measured to medians, a table and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch

from lightning_asyncpp.pipeline.trace import utilisation
from lightning_asyncpp.tools.bench.job import ASYNC, ASYNC_CLIPPED, ONE_F_ONE_B, TITLES, Job, RankRun
from lightning_asyncpp.tools.bench.launch import Measured


@dataclass(frozen=True)
class Spread:
    """A measured quantity over repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise ``values``."""
        return cls(statistics.median(values), min(values), max(values))

    def format(self, digits: int) -> str:
        """The median, and the extremes in brackets."""
        return f"{self.median:.{digits}f} [{self.min:.{digits}f}-{self.max:.{digits}f}]"


@dataclass(frozen=True)
class Line:
    """What the table says about a system.

    Attributes:
        system: which.
        milliseconds: elapsed time per mini-batch.
        utilisation: share of the elapsed time inside the stage's own bodies, on the busiest stage.
        gain: time of torch's Schedule1F1B over this system's, pairwise by repeat; None if it did not run.
    """

    system: str
    milliseconds: Spread
    utilisation: Spread
    gain: Spread | None


def milliseconds_per_batch(run: RankRun, job: Job) -> float:
    """Mean time per mini-batch in the steady state: without the warm-up and the last mini-batch."""
    return (run.marks[job.warm_up + job.mini_batches - 1] - run.marks[job.warm_up - 1]) / job.mini_batches * 1e3


def utilisation_of(run: RankRun, job: Job) -> float:
    """Share of the steady state that this stage spent inside its own forward and backward bodies."""
    return utilisation(run.bodies, run.marks[job.warm_up - 1], run.marks[job.warm_up + job.mini_batches - 1])


def summarise(job: Job, measured: Measured) -> list[Line]:
    """One line per system, in the job's order."""
    times = {system: _times(job, measured, system) for system in measured.runs}
    lines = []
    for system, repeats in measured.runs.items():
        busiest = [max(utilisation_of(run, job) for run in ranks) for ranks in repeats]
        gain = None
        if ONE_F_ONE_B in times:
            gain = Spread.of([base / own for base, own in zip(times[ONE_F_ONE_B], times[system])])
        lines.append(Line(system, Spread.of(times[system]), Spread.of(busiest), gain))
    return lines


def clipping_cost(job: Job, measured: Measured) -> float | None:
    """How much longer a mini-batch takes with clipping, relative, pairwise by repeat; None if it was not measured."""
    if ASYNC_CLIPPED not in measured.runs:
        return None
    pairs = zip(_times(job, measured, ASYNC_CLIPPED), _times(job, measured, ASYNC))
    return statistics.median(clipped / plain for clipped, plain in pairs) - 1


def _times(job: Job, measured: Measured, system: str) -> list[float]:
    """Milliseconds per mini-batch of each repeat, of its slowest rank."""
    return [max(milliseconds_per_batch(run, job) for run in ranks) for ranks in measured.runs[system]]


def table(lines: Sequence[Line]) -> str:
    """The lines as text, medians with the extremes over the repeats."""
    rows = [("system", "ms per mini-batch", "utilisation", "gain over 1F1B")]
    for line in lines:
        gain = "" if line.gain is None else line.gain.format(2)
        rows.append((TITLES[line.system], line.milliseconds.format(1), line.utilisation.format(3), gain))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def as_json(job: Job, lines: Sequence[Line], measured: Measured, **more: Any) -> dict[str, Any]:
    """Everything that the table says, the settings and the machine."""
    return {
        "job": asdict(job),
        "machine": machine(),
        "facts": measured.facts,
        "systems": {line.system: {k: v for k, v in asdict(line).items() if k != "system"} for line in lines},
        **more,
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


def write_json(path: str, content: Any) -> None:
    """Write JSON that people can read too."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
