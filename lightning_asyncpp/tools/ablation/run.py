"""Runs the trainings of an ablation as processes, as many at once as there are slots, and keeps its tables."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightning_asyncpp.tools.ablation.cell import CELL
from lightning_asyncpp.tools.ablation.config import cell_config, cell_name, digest_of, with_places
from lightning_asyncpp.tools.ablation.recipe import Recipe
from lightning_asyncpp.tools.ablation.recorder import PROGRESS
from lightning_asyncpp.tools.ablation.results import CellResult, read_result, write_tables
from lightning_asyncpp.tools.ablation.rows import CellKey, Plan, Row, make_plan
from lightning_asyncpp.tools.ablation.yaml_files import write_yaml

LOG = "cell.log"
CELLS = "cells"
_POLL_SECONDS = 0.1
_MOST_FAILURES = 3  # that many at first, and nothing else: the rest would fail as well


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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Table:
    """The trainings of a recipe on disk: their folders, results and tables.

    Args:
        recipe: what to train.
        rows: its rows, all of them.
        folder: of the table.
    """

    def __init__(self, recipe: Recipe, rows: Sequence[Row], folder: Path) -> None:
        self.recipe = recipe
        self.folder = folder
        self.rows = {row.key: row for row in rows}
        self.results: dict[CellKey, CellResult] = {}
        self._names: dict[CellKey, str] = {}

    def plan(self, rows: Sequence[Row] | None = None) -> Plan:
        """Plan ``rows``, by default all of them, with every result that is on disk."""
        rows = list(self.rows.values()) if rows is None else rows
        while True:
            outcomes = {key: result.loss for key, result in self.results.items()}
            plan = make_plan(rows, self.recipe.seeds, self.recipe.lr_extensions, outcomes)
            found = {key: result for key in plan.pending if (result := self.read(key)) is not None}
            if not found:
                return plan
            self.results |= found

    def name(self, key: CellKey) -> str:
        """Name of a training's folder."""
        if key not in self._names:
            self._names[key] = cell_name(self.recipe, self.rows[key.row], key.lr, key.seed)
        return self._names[key]

    def cell_folder(self, key: CellKey) -> Path:
        """Folder of a training."""
        return self.folder.parent / CELLS / self.name(key)

    def read(self, key: CellKey) -> CellResult | None:
        """Result on disk; tables of one output share what they have in common, whatever they call it."""
        same = (self.folder.parent / CELLS).glob(f"*_{digest_of(self.name(key))}")
        return next((result for folder in same if (result := read_result(folder)) is not None), None)

    def make_cell(self, key: CellKey, accelerator: str) -> Path:
        """Make the folder of a training anew; what an interrupted one left there is discarded."""
        folder = self.cell_folder(key)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = cell_config(self.recipe, self.rows[key.row], key.lr, key.seed)
        config = with_places(config, self.recipe, folder.resolve(), accelerator)
        write_yaml(folder / CELL, {"base_recipe": str(self.recipe.base_path), "config": config})
        return folder

    def write(self) -> None:
        """Write the tables from all results that the recipe asks for."""
        wanted = set(self.plan().cells)
        results = {key: result for key, result in self.results.items() if key in wanted}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tables(self.folder, self.recipe.name, results, {key: self.name(key) for key in results})


class Progress(Protocol):
    """What is told about a run."""

    def ended(self, running: Running, result: CellResult | None) -> None:
        """One training is over; no result: it failed."""

    def show(self, plan: Plan, running: Sequence[Running]) -> None:
        """The present state."""


class Runner:
    """Runs what a table lacks.

    Args:
        table: where results go.
        rows: the rows to run, with those whose learning rate they use.
        environments: one per slot: environment variables to set for its trainings.
        accelerator: what the trainings run on, as the Trainer names it.
        progress: is told of everything.
    """

    def __init__(
        self,
        table: Table,
        rows: Sequence[Row],
        environments: Sequence[dict[str, str]],
        accelerator: str,
        progress: Progress,
    ) -> None:
        self.table = table
        self.rows = rows
        self.environments = environments
        self.accelerator = accelerator
        self.progress = progress
        self.running: list[Running] = []
        self.failures: list[Failure] = []
        self._finished = 0
        self._data_is_ready = False

    @property
    def gave_up(self) -> bool:
        """Whether the first trainings all failed, so that no more were started."""
        return not self._finished and len(self.failures) >= _MOST_FAILURES

    def run(self) -> Plan:
        """Run until nothing is left that can be run; return the last plan.

        Whatever ends this method, no training goes on after it.
        """
        try:
            self.table.write()
            plan = self.table.plan(self.rows)
            while True:
                if not self.gave_up:
                    self._start(plan)
                self.progress.show(plan, self.running)
                if not self.running:
                    return plan
                if self._collect():
                    plan = self.table.plan(self.rows)
                    self.table.write()
                else:
                    time.sleep(_POLL_SECONDS)
        finally:
            for running in self.running:
                running.kill()

    def _start(self, plan: Plan) -> None:
        taken = {running.key for running in self.running} | {failure.key for failure in self.failures}
        free = [s for s in range(len(self.environments)) if s not in {running.slot for running in self.running}]
        waiting = [key for key in plan.pending if key not in taken]
        for slot, key in zip(free, waiting):
            # The first training prepares the data; others at the same time would do all of it once more.
            if self.running and not self._ready():
                return
            self.running.append(self._launch(key, slot))

    def _ready(self) -> bool:
        self._data_is_ready = self._data_is_ready or any(running.progress() for running in self.running)
        return self._data_is_ready

    def _launch(self, key: CellKey, slot: int) -> Running:
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
            result = read_result(running.folder)
            if result is None:
                log, code = running.folder / LOG, running.process.returncode
                self.failures.append(Failure(running.key, running.name, log, code))
            else:
                self._finished += 1
                self.table.results[running.key] = result
            self.progress.ended(running, result)
        return bool(ended)


def worker_command(folder: Path) -> list[str]:
    """The command that trains the cell of ``folder`` and ends with this process."""
    worker = [sys.executable, "-m", "lightning_asyncpp.tools.ablation.cell"]
    return [*worker, str(folder), "--parent", str(os.getpid())]


def slots(
    workers: int | None, threads: int, gpus: Sequence[str], cores: Callable[[], int | None] = os.cpu_count
) -> list[dict[str, str]]:
    """The environment of every slot: one per GPU, or as many as the cores have room for.

    Args:
        workers: number of slots without GPUs; ``None``: cores divided by threads.
        threads: of every training.
        gpus: what CUDA_VISIBLE_DEVICES may be set to; one named twice gets two slots.
        cores: counts the cores of this machine.
    """
    common = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if gpus:
        return [common | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    count = workers if workers is not None else max(1, (cores() or 1) // threads)
    return [common | {"CUDA_VISIBLE_DEVICES": ""} for _ in range(count)]
