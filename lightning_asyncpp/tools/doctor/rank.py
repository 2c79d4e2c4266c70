"""One rank of small trainings, in a process of its own: ``python -m lightning_asyncpp.tools.doctor.rank JOB``."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_asyncpp.tools.doctor.cases import CASES, MICRO_BATCHES, Place, fit


def work(job: dict[str, Any]) -> None:
    """Train the cases of a job one after the other; rank 0 writes what came of each to a file.

    Args:
        job: ``folder``, ``place`` (arguments of :class:`Place`), ``cases``, ``together`` (replicas whose batches one
            process trains) and ``ends`` (by ``time.time()``, when the process is killed).
    """
    folder, place, together = Path(job["folder"]), Place(**job["place"]), int(job["together"])
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(1.0, job["ends"] - time.time() - 2), exit=False)
    for name in job["cases"]:
        print(f"rank {os.environ['RANK']}: {name}", flush=True)
        outcome = fit(CASES[name], place, folder, 8 * together, MICRO_BATCHES * together)
        if os.environ["RANK"] == "0":
            path = folder / f"{name}.pt"
            torch.save(outcome, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
