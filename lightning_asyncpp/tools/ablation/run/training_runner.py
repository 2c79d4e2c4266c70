"""Runs the trainings of an ablation as processes, as many at once as there are slots, keeps its tables, and tells.

What is told: one line per training, and on a terminal a bar below them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import shorten

from tqdm import tqdm

from lightning_asyncpp.tools.ablation.grid import CellKey
from lightning_asyncpp.tools.ablation.recipe.rows import Plan, RowRecipe
from lightning_asyncpp.tools.ablation.results import RESULT, CellResult
from lightning_asyncpp.tools.ablation.run.cell import CHANGED
from lightning_asyncpp.tools.ablation.run.recorder import PROGRESS
from lightning_asyncpp.tools.ablation.run.training_folders import LOG, Table

_POLL_SECONDS = 0.1
_MOST_FAILURES = 3  # that many at first, and nothing else: the rest would fail as well
_LOG_LINES = 15


@dataclass(frozen=True)
class Failure:
    """A training that ended without a result."""

    key: CellKey
    name: str
    log: Path
    code: int


@dataclass
class Running:
    """A training that is under way."""

    key: CellKey
    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    slot: int
    started: float

    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.started

    def progress(self) -> str:
        """The step that it is at; empty until its data is prepared."""
        try:
            return (self.folder / PROGRESS).read_text()
        except OSError:
            return ""

    def kill(self) -> None:
        """End it with all processes that it started; what is unfinished is discarded anyway."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says so of one that has just ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Runner:
    """Runs what a table lacks.

    Args:
        table: where results go.
        rows: the rows to run, with those whose learning rate they use.
        environments: one per slot: environment variables to set for its trainings.
        accelerator: what the trainings run on, as the Trainer names it.
        report: is told of everything.
    """

    def __init__(
        self,
        table: Table,
        rows: Sequence[RowRecipe],
        environments: Sequence[dict[str, str]],
        accelerator: str,
        report: Report,
    ) -> None:
        self.table = table
        self.rows = rows
        self.environments = environments
        self.accelerator = accelerator
        self.report = report
        self.running: list[Running] = []
        self.failures: list[Failure] = []
        self.trouble = ""
        """What the last try to write the tables or to start a training ended with, if it failed."""
        self._data_is_ready = False
        self._is_stuck = False

    @property
    def gave_up(self) -> str:
        """Why no more trainings are started; empty if there is no reason."""
        if any(failure.code == CHANGED for failure in self.failures):
            return "The code has changed meanwhile: no more were started; the same command goes on with the new code."
        if not self.table.results and len(self.failures) >= _MOST_FAILURES:
            return "The first runs all failed: no more were started."
        return ""

    def run(self) -> Plan:
        """Run until nothing is left that can be run; return the last plan.

        Whatever ends this method, no training goes on after it.
        """
        try:
            plan = self.table.plan(self.rows)
            self._write()
            while True:
                if not self.gave_up and not self._is_stuck:
                    self._start(plan)
                self.report.show(plan, self.running)
                if not self.running:
                    return plan
                if self._collect():
                    plan = self.table.plan(self.rows)
                    self._is_stuck = False
                    self._write()
                else:
                    time.sleep(_POLL_SECONDS)
        finally:
            for running in self.running:
                running.kill()

    def _start(self, plan: Plan) -> None:
        """Start what has never been tried, then what failed or was interrupted before; the same training only once."""
        free = [s for s in range(len(self.environments)) if s not in {running.slot for running in self.running}]
        if not free:
            return
        waiting = sorted(plan.pending, key=self.table.was_tried)
        keys = [running.key for running in self.running] + [failure.key for failure in self.failures]
        taken = {self.table.digest(key) for key in keys}
        for slot in free:
            key = next((key for key in waiting if self.table.digest(key) not in taken), None)
            # The first training prepares the data; others at the same time would do all of it once more.
            if key is None or (self.running and not self._ready()):
                return
            try:
                self.running.append(self._launch(key, slot))
            except OSError as error:
                self._is_stuck = True  # until something ends, which may leave room
                self._tell(f"{self.table.name(key)} cannot be started: {error}")
                return
            taken.add(self.table.digest(key))

    def _write(self) -> None:
        try:
            self.table.write()
            self.trouble = ""
        except Exception as error:  # a full disk, or a mistake in a table, must not end trainings of hours
            self._tell(f"the tables cannot be written: {type(error).__name__}: {error}")

    def _tell(self, trouble: str) -> None:
        self.trouble = trouble
        self.report.warn(trouble + ("; tried again when the next run has ended" if self.running else ""))

    def _ready(self) -> bool:
        self._data_is_ready = self._data_is_ready or any(running.progress() for running in self.running)
        return self._data_is_ready

    def _launch(self, key: CellKey, slot: int) -> Running:
        if (aside := self.table.set_aside(key)) is not None:
            self.report.warn(f"{aside} is kept: its {RESULT} cannot be understood, and the training is run again")
        folder = self.table.make_cell(key, self.accelerator)
        with open(folder / LOG, "wb") as log:
            # In a session of its own, an interrupt from the keyboard reaches this process alone.
            process = subprocess.Popen(
                worker_command(folder),
                env={**os.environ, **self.environments[slot]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(key, self.table.name(key), folder, process, slot, time.monotonic())

    def _collect(self) -> bool:
        """Take up what has ended; whether anything has."""
        ended = [running for running in self.running if running.process.poll() is not None]
        for running in ended:
            self._data_is_ready = self._ready()
            self.running.remove(running)
            running.kill()  # processes that it left behind
            result = self.table.take(running.key)
            if result is None:
                log, code = running.folder / LOG, running.process.returncode
                self.failures.append(Failure(running.key, running.name, log, code))
                self.table.note_failure(running.key, code)
            self.report.ended(running, result)
        return bool(ended)


def worker_command(folder: Path) -> list[str]:
    """The command that trains the cell of ``folder`` and ends with this process."""
    worker = [sys.executable, "-m", "lightning_asyncpp.tools.ablation.run.cell"]
    return [*worker, str(folder), "--parent", str(os.getpid())]


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
