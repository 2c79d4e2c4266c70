"""Tells how an ablation goes on: one line per training, and on a terminal a bar below them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from datetime import timedelta
from textwrap import shorten

from tqdm import tqdm

from lightning_asyncpp.tools.ablation.results import CellResult
from lightning_asyncpp.tools.ablation.rows import Plan
from lightning_asyncpp.tools.ablation.run import LOG, Running

_LOG_LINES = 15


class Report:
    """Prints to standard output; the bar goes to standard error.

    Args:
        slots: number of trainings that can run at once.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.seconds: list[float] = []
        self.failed = 0
        self.diverged = 0
        self._shown: tuple[int, int] | None = None
        self._bar = tqdm(disable=not sys.stderr.isatty(), unit="run", dynamic_ncols=True, bar_format="{desc}")

    def ended(self, running: Running, result: CellResult | None) -> None:
        """Print one line, and of a failed training the end of its log."""
        seconds = running.seconds()
        if result is None:
            self.failed += 1
            code = running.process.returncode
            print_line(f"FAILED    {running.name}  (exit code {code}); the end of {running.folder / LOG}:")
            print_line(_tail(running))
            return
        self.seconds.append(seconds)
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
        elif self._shown is None or self._shown != (done, self.failed):
            self._shown = (done, self.failed)
            print_line(self._summary(done, plan, running))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _summary(self, done: int, plan: Plan, running: Sequence[Running]) -> str:
        parts = [f"{done}/{plan.total} runs", f"{len(running)} running"]
        parts += [f"{self.diverged} diverged"] if self.diverged else []
        parts += [f"{self.failed} failed"] if self.failed else []
        left = self._seconds_left(plan.total - done - self.failed, running)
        parts += [f"about {timedelta(seconds=round(left))} left"] if left is not None else []
        return ", ".join(parts)

    def _seconds_left(self, left: int, running: Sequence[Running]) -> float | None:
        """Estimate from the median training so far; ``None`` before the first one has ended."""
        if not self.seconds:
            return None
        median = statistics.median(self.seconds)
        spent = sum(min(r.seconds(), median) for r in running)
        return max(0.0, left * median - spent) / min(self.slots, max(1, left))


def print_line(text: str) -> None:
    """Print above the bar, at once."""
    tqdm.write(text)
    sys.stdout.flush()


def _tail(running: Running) -> str:
    lines = (running.folder / LOG).read_text(errors="replace").splitlines()
    return "\n".join(f"    | {line}" for line in lines[-_LOG_LINES:])
