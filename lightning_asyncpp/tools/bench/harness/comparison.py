"""From what the processes measured to medians, a table and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch

from lightning_asyncpp.core.trace import utilisation
from lightning_asyncpp.tools.bench.harness.job import Job, RankRun
from lightning_asyncpp.tools.bench.harness.measure import Measured
from lightning_asyncpp.tools.bench.names import ASYNC, EXTRAS, FLOOR, ONE_F_ONE_B, SPLIT_BACKWARD, TITLES
from lightning_asyncpp.tools.text import Spread, aligned


@dataclass(frozen=True)
class Line:
    """What the table says about a system.

    Attributes:
        system: which.
        milliseconds: elapsed time per mini-batch.
        utilisation: share of the elapsed time inside the stage's own bodies, on the busiest stage; None where they
            were not recorded, or cannot tell: those that compute do not see gradients of weights that run apart.
        gain: time of torch's Schedule1F1B over this system's, pairwise by repeat; None if it did not run.
        of_floor: time of the floor over this system's, pairwise by repeat: its throughput relative to that of stages
            that never wait; None if the floor did not run.
    """

    system: str
    milliseconds: Spread
    utilisation: Spread | None
    gain: Spread | None
    of_floor: Spread | None


def milliseconds_per_batch(run: RankRun, job: Job) -> float:
    """Mean time per mini-batch in the steady state: without the warm-up and the last mini-batch."""
    return (run.marks[job.warm_up + job.mini_batches - 1] - run.marks[job.warm_up - 1]) / job.mini_batches * 1e3


def utilisation_of(run: RankRun, job: Job) -> float:
    """Share of the steady state that this stage spent inside its own forward and backward bodies."""
    return utilisation(run.bodies, run.marks[job.warm_up - 1], run.marks[job.warm_up + job.mini_batches - 1])


def summarise(job: Job, measured: Measured) -> list[Line]:
    """One line per system that ran, in the job's order."""
    times = {system: _times(job, measured, system) for system in measured.runs}
    return [
        Line(
            system,
            Spread.of(own),
            _utilisation(job, measured, system),
            _relative(times.get(ONE_F_ONE_B), own),
            _relative(times.get(FLOOR), own),
        )
        for system, own in times.items()
    ]


def _utilisation(job: Job, measured: Measured, system: str) -> Spread | None:
    if job.work == "compute" and system in SPLIT_BACKWARD:
        return None
    if not any(run.bodies for ranks in measured.runs[system] for run in ranks):
        return None
    return Spread.of([max(utilisation_of(run, job) for run in ranks) for ranks in measured.runs[system]])


def _relative(base: Sequence[float] | None, own: Sequence[float]) -> Spread | None:
    return None if base is None else Spread.of([b / o for b, o in zip(base, own)])


def costs_of_extras(job: Job, measured: Measured) -> dict[str, Spread]:
    """How much longer a mini-batch takes with an extra than without, relative, pairwise by repeat, per system."""
    if ASYNC not in measured.runs:
        return {}
    plain = _times(job, measured, ASYNC)
    extras = [system for system in measured.runs if system in EXTRAS]
    return {s: Spread.of([w / p - 1 for w, p in zip(_times(job, measured, s), plain)]) for s in extras}


def costs_text(costs: Mapping[str, Spread]) -> str:
    """A line for each extra."""
    return "".join(
        f"{EXTRAS[system]} costs {cost.median:+.1%} [{cost.min:+.1%} to {cost.max:+.1%}] of the time\n"
        for system, cost in costs.items()
    )


def _times(job: Job, measured: Measured, system: str) -> list[float]:
    """Milliseconds per mini-batch of each repeat, of its slowest rank."""
    return [max(milliseconds_per_batch(run, job) for run in ranks) for ranks in measured.runs[system]]


def table(lines: Sequence[Line], failures: Mapping[str, str] | None = None, ideal_gain: float | None = None) -> str:
    """The lines as text, medians with the extremes over the repeats.

    Args:
        lines: of the systems that ran.
        failures: of those that did not, with the reason.
        ideal_gain: of an asynchronous pipeline over an ideal 1F1B; adds the column of the share of it that was reached.
    """
    rows = [["system", "ms per mini-batch", "utilisation", "gain over 1F1B", "of the floor"]]
    for line in lines:
        cells = (line.milliseconds, 1), (line.utilisation, 3), (line.gain, 2), (line.of_floor, 3)
        rows.append([TITLES[line.system], *(_format(spread, digits) for spread, digits in cells)])
    if ideal_gain is not None:
        shares = [_share(line, ideal_gain) for line in lines]
        rows = [[*row, last] for row, last in zip(rows, ["gain / ideal", *(_format(share, 2) for share in shares)])]
    failed = [f"{TITLES[system]}  cannot: {reason}" for system, reason in (failures or {}).items()]
    return "\n".join([aligned(_without_empty_columns(rows)), *failed])


def _without_empty_columns(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Rows without the columns that have a title alone: what was not measured."""
    titles, *others = rows
    kept = [column for column in range(len(titles)) if not others or any(row[column] for row in others)]
    return [[row[column] for column in kept] for row in rows]


def _share(line: Line, ideal_gain: float) -> Spread | None:
    """Of the gain that an asynchronous pipeline could have; for others it has no meaning."""
    return line.gain.scaled(1 / ideal_gain) if line.gain and line.system.startswith(ASYNC) else None


def _format(spread: Spread | None, digits: int) -> str:
    return "" if spread is None else spread.format(digits)


def facts_line(facts: Mapping[str, float]) -> str:
    """What was found out about messages and the link, in a line; empty if nothing was."""
    texts = []
    if "link_ping_ms" in facts:
        rate = f"{facts['link_mbit']:g} Mbit/s" if facts["link_mbit"] else "no limit of bandwidth"
        texts.append(
            f"link: {facts['link_latency_ms']:g} ms asked, {facts['link_ping_ms']:.2f} ms measured one way, {rate}"
        )
    if "link_message_ms" in facts:
        texts.append(f"a small message over it takes {facts['link_message_ms']:.2f} ms")
    if "message_ms" in facts:
        texts.append(f"a small message inside a host takes {facts['message_ms']:.2f} ms")
    return "; ".join(texts)


def as_json(
    job: Job, lines: Sequence[Line], measured: Measured, costs: Mapping[str, Spread], **more: Any
) -> dict[str, Any]:
    """Everything that the table and the lines below it say, the settings and the machine."""
    return {
        "job": asdict(job),
        "machine": machine(),
        "facts": measured.facts,
        "failures": measured.failures,
        "systems": {line.system: {k: v for k, v in asdict(line).items() if k != "system"} for line in lines},
        "costs": {system: asdict(cost) for system, cost in costs.items()},
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
