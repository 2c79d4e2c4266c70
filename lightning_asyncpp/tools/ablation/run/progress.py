"""Tells how an ablation goes on: one line per training, and on a terminal a bar below them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from textwrap import shorten

from tqdm import tqdm

from lightning_asyncpp.tools.ablation.grid import CellKey
from lightning_asyncpp.tools.ablation.recipe.rows import Plan
from lightning_asyncpp.tools.ablation.results import CellResult
from lightning_asyncpp.tools.ablation.run.training_folders import LOG
from lightning_asyncpp.tools.ablation.run.training_runner import Running

_LOG_LINES = 15


class Report:
    """Prints to standard output; the bar and what is wrong go to standard error.

    Args:
        slots: number of trainings that can run at once.
        results: of what is over; the caller goes on filling it.
    """

    def __init__(self, slots: int, results: Mapping[CellKey, CellResult]) -> None:
        self.slots = slots
        self.results = results
        self.starts: list[float] = []
        self.failed: set[CellKey] = set()
        self.diverged = 0
        self._shown: tuple[int, int] | None = None
        self._bar = tqdm(disable=not sys.stderr.isatty(), unit="run", dynamic_ncols=True, bar_format="{desc}")

    def ended(self, running: Running, result: CellResult | None) -> None:
        """Print one line, and of a failed training the end of its log."""
        seconds = running.seconds()
        if result is None:
            self.failed.add(running.key)
            code = running.process.returncode
            print_line(f"FAILED    {running.name}  (exit code {code}); the end of {running.folder / LOG}:")
            print_line(_tail(running))
            return
        self.starts.append(max(0.0, seconds - result.seconds))
        if result.status == "diverged":
            self.diverged += 1
            print_line(
                f"diverged  {running.name}  after {result.steps} steps, {seconds:.1f} s: {shorten(result.reason, 120)}"
            )
        else:
            print_line(f"finished  {running.name}  loss {result.loss:.4f}  {seconds:.1f} s")

    def show(self, plan: Plan, running: Sequence[Running]) -> None:
        """Redraw the bar; elsewhere than on a terminal print a line whenever something has ended."""
        done = len(plan.cells) - len(plan.pending)
        if not self._bar.disable:
            steps = ", ".join(r.progress() or "starting" for r in running)
            self._bar.set_description_str(f"{self._summary(done, plan, running)} [{steps}]")
        elif self._shown is None or self._shown != (done, len(self.failed)):
            self._shown = (done, len(self.failed))
            print_line(self._summary(done, plan, running))

    def warn(self, message: str) -> None:
        """Print one line."""
        tqdm.write(message, file=sys.stderr)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _summary(self, done: int, plan: Plan, running: Sequence[Running]) -> str:
        parts = [f"{done}/{plan.total} runs", f"{len(running)} running"]
        parts += [f"{self.diverged} diverged"] if self.diverged else []
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        start = statistics.median(self.starts) if self.starts else 0.0
        spent = {r.key: r.seconds() for r in running}
        left = seconds_left(plan, self.results, self.slots, start, self.failed, spent)
        parts += [f"about {duration(left)} left"] if left is not None else []
        return ", ".join(parts)


def seconds_left(
    plan: Plan,
    results: Mapping[CellKey, CellResult],
    slots: int,
    start: float = 0.0,
    failed: Collection[CellKey] = (),
    spent: Mapping[CellKey, float] | None = None,
) -> float | None:
    """Estimate from the median length of the finished trainings, those of the same optimizer where there are some.

    Args:
        plan: what is left.
        results: of what is over.
        slots: number of trainings that can run at once.
        start: seconds that every training needs before it trains.
        failed: pending trainings that are not run.
        spent: seconds since the start of those that are under way.

    Returns:
        ``None`` if none has finished.
    """
    known: dict[str, list[float]] = {}
    for key, result in results.items():
        if result.status == "finished":
            known.setdefault(key.row.group.optimizer, []).append(result.seconds)
    if not known:
        return None
    anyone = statistics.median(seconds for lengths in known.values() for seconds in lengths)
    medians = {optimizer: statistics.median(lengths) for optimizer, lengths in known.items()}
    left = {key: start + medians.get(key.row.group.optimizer, anyone) for key in plan.pending if key not in failed}
    total = sum(left.values()) + plan.waiting * (start + anyone)
    total -= sum(min(seconds, left.get(key, 0.0)) for key, seconds in (spent or {}).items())
    return total / min(slots, max(1, len(left) + plan.waiting))


def duration(seconds: float) -> str:
    """As hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def print_line(text: str) -> None:
    """Print above the bar, at once."""
    tqdm.write(text)
    sys.stdout.flush()


def _tail(running: Running) -> str:
    lines = (running.folder / LOG).read_text(errors="replace").splitlines()
    return "\n".join(f"    | {line}" for line in lines[-_LOG_LINES:])
