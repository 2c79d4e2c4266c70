"""Process of a rank, as a launcher starts it; it ends as a script does."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.faults.jobs import Job
from tests.faults.places import Fault, Places
from tests.helpers.pool import end_with_parent
from tests.helpers.programs import end_process, speak_into

WHERE_SIGNAL = signal.SIGUSR2
_CLONE_NEWNET = 0x40000000


def run(
    rank: int, job: Job, folder: Path, checkpoints: Path, fault: Fault | None, environment: dict[str, str],
    namespace: str, is_counted: bool,
) -> None:  # fmt: skip
    """Run a rank of a job and end this process; its files are named by its rank, such as ``0.result``."""
    os.setsid()
    speak_into(*[str(folder / f"{rank}.output")] * 2)
    faulthandler.register(WHERE_SIGNAL, all_threads=True)
    end_with_parent()
    if namespace:
        _enter(namespace)
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # for DataLoader workers, as in a script
    places = Places(rank, fault, folder, is_counted)
    end_process(_code_of(places, job, checkpoints, folder / f"{rank}.result"))


def _code_of(places: Places, job: Job, checkpoints: Path, result: Path) -> int:
    """Train, and return the exit code that Python would give this process."""
    try:
        places.start()
        came_to = job.train(places, checkpoints)
        result.write_bytes(pickle.dumps(came_to | {"counts": dict(places.counts)}))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _enter(namespace: str) -> None:
    """Move this thread, and threads it starts later, into the network namespace of another host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def result_of(folder: Path, rank: int) -> Any:
    """Return the result of a rank that ended without an error."""
    return pickle.loads((folder / f"{rank}.result").read_bytes())
