"""Runs the trainings that a table lacks, each a process of its own, as many at once as there are slots."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from research.ablations.recipe import Arm
from research.ablations.rows import Key
from research.ablations.table import Table

LOG = "training.log"


def slots(workers: int, threads: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Environment variables of the trainings of every slot: one per GPU, else as many as ``workers``."""
    common = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return [common | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus or [""] * workers]


def run(table: Table, arms: Sequence[Arm], environments: Sequence[Mapping[str, str]], accelerator: str) -> list[str]:
    """Run until nothing is left that can be run, and write the table whenever a training has ended.

    Returns:
        The folders of the trainings that failed. They have no result, and the next call tries them again.
    """
    running: dict[int, tuple[Key, subprocess.Popen[bytes]]] = {}
    failed: list[str] = []
    try:
        while True:
            plan, missing = table.plan(arms)
            table.write()
            for slot in range(len(environments)):
                taken = {_digest(table, key) for key, _ in running.values()} | {_hash(name) for name in failed}
                key = next((key for key in missing if _digest(table, key) not in taken), None)
                if key is not None and slot not in running:
                    running[slot] = key, _start(table, key, environments[slot], accelerator)
            if not running:
                return failed
            key, process = _next_ended(running)
            done, total = len(plan.needed) - len(missing) + 1, len(plan.needed) + plan.waiting
            if result := table.take(key):
                ended = "diverged" if math.isnan(result.loss) else f"{table.recipe.metric} {result.loss:.4f}"
                print(f"{done}/{total}  {table.cell(key).name}: {ended}, {result.seconds:.0f} s", flush=True)
            else:
                failed.append(str(table.cell(key)))
                print(f"FAILED  {failed[-1]}/{LOG} (exit code {process.returncode})", flush=True)
    finally:
        for _, process in running.values():
            process.kill()


def _digest(table: Table, key: Key) -> str:
    return _hash(table.cell(key).name)


def _hash(name: str) -> str:
    return name.rpartition("_")[2]


def _start(table: Table, key: Key, environment: Mapping[str, str], accelerator: str) -> subprocess.Popen[bytes]:
    """Start a training; what an interrupted one left is discarded."""
    folder = table.cell(key).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    table.recipe.write_cell(folder, table.arms[key.row], key, accelerator)
    with (folder / LOG).open("wb") as log:
        # In a session of its own: an interrupt from the keyboard reaches this process alone.
        return subprocess.Popen(
            [sys.executable, "-m", "research.ablations.training", str(folder)],
            env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _next_ended(running: dict[int, tuple[Key, subprocess.Popen[bytes]]]) -> tuple[Key, subprocess.Popen[bytes]]:
    """Wait until one has ended, and remove it."""
    while True:
        for slot, (_, process) in running.items():
            if process.poll() is not None:
                return running.pop(slot)
        time.sleep(0.2)
