"""Runs the trainings that a table lacks, as many at once as there are slots, each slot a process."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from research.ablations.recipe import Arm
from research.ablations.rows import Key
from research.ablations.table import Table
from research.ablations.training import LOG, prepare, train

_TRAININGS = 20  # of a process; compiled code piles up in it


class Slot:
    """A process that trains, one training at a time, and that a new one replaces now and then, or when it has died.

    Args:
        threads: threads of torch.
        gpu: number of the only GPU that the process sees; "" for none.
    """

    def __init__(self, threads: int, gpu: str = "") -> None:
        self._arguments = os.getpid(), threads, gpu
        self._process: ProcessPoolExecutor | None = None
        self._training: Future[None] | None = None
        self._started = 0

    def start(self, folder: Path) -> Future[None]:
        """Train what the folder's ``fit.yaml`` says."""
        if self._process is None or self._started == _TRAININGS:
            self.stop()
            self._process, self._started = ProcessPoolExecutor(1, get_context("spawn"), prepare, self._arguments), 0
        self._started += 1
        try:
            self._training = self._process.submit(train, folder)
            return self._training
        except BrokenProcessPool:  # it died between two trainings
            self.stop()
            return self.start(folder)

    def stop(self) -> None:
        """End the process, and with it a training."""
        if self._process is not None:
            trains = self._training is not None and not self._training.done()
            for process in list((self._process._processes or {}).values()) if trains else ():
                process.kill()  # a shutdown alone waits for the training
            self._process.shutdown(wait=not trains, cancel_futures=True)
            self._process = None


def slots(workers: int, threads: int, gpus: Sequence[str]) -> list[Slot]:
    """Slots: one per GPU, else as many as ``workers``."""
    return [Slot(threads, gpu) for gpu in gpus or [""] * workers]


def run(table: Table, arms: Sequence[Arm], slots: Sequence[Slot], accelerator: str) -> list[str]:
    """Run until nothing is left that can be run, and write the table whenever a training has ended.

    Returns:
        The folders of the trainings that failed. They have no result, and the next call tries them again.
    """
    running: dict[Future[None], tuple[Slot, Key]] = {}
    failed: list[str] = []
    try:
        while True:
            plan, missing = table.plan(arms)
            table.write()
            taken = {_digest(table, key) for _, key in running.values()} | {_hash(name) for name in failed}
            for slot in [slot for slot in slots if slot not in [busy for busy, _ in running.values()]]:
                key = next((key for key in missing if _digest(table, key) not in taken), None)
                if key is not None:
                    taken.add(_digest(table, key))
                    running[slot.start(_prepared(table, key, accelerator))] = slot, key
            if not running:
                return failed
            ended = wait(running, return_when=FIRST_COMPLETED).done.pop()
            slot, key = running.pop(ended)
            if ended.exception() is not None:  # the training failed, and its process has ended
                slot.stop()
            done, total = len(plan.needed) - len(missing) + 1, len(plan.needed) + plan.waiting
            if result := table.take(key):
                loss = "diverged" if math.isnan(result.loss) else f"{table.recipe.metric} {result.loss:.4f}"
                print(f"{done}/{total}  {table.cell(key).name}: {loss}, {result.seconds:.0f} s", flush=True)
            else:
                failed.append(str(table.cell(key)))
                print(f"FAILED  {failed[-1]}/{LOG}", flush=True)
    finally:
        for slot in slots:
            slot.stop()


def _digest(table: Table, key: Key) -> str:
    return _hash(table.cell(key).name)


def _hash(name: str) -> str:
    return name.rpartition("_")[2]


def _prepared(table: Table, key: Key, accelerator: str) -> Path:
    """Write the folder of a training; what an interrupted one left is discarded."""
    folder = table.cell(key).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    table.recipe.write_cell(folder, table.arms[key.row], key, accelerator)
    return folder
