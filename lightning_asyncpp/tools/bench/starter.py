"""The processes of one host: ``python -m lightning_asyncpp.tools.bench.starter FOLDER HOST``.

It imports torch and Lightning once and forks the host's ranks, so that 32 of them start in seconds and share the
memory of what was imported. It ends when they end, with a non-zero exit code as soon as one fails, and they end with
it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from lightning_asyncpp.tools.bench.job import Job
from lightning_asyncpp.tools.bench.processes import end_with_parent
from lightning_asyncpp.tools.bench.worker import JOB, work

FAILED = "failed"


def main(argv: list[str]) -> None:
    """Fork the ranks of the host, and wait for them."""
    folder, host = Path(argv[0]), int(argv[1])
    job = Job.load(folder / JOB)
    per_host = job.stages // job.hosts
    children: dict[int, int] = {}
    # A rank's first collection of what it shares with the others would copy it, for a second, amid what is measured.
    gc.freeze()
    try:
        for local_rank in range(per_host):
            rank = host * per_host + local_rank
            children[_fork(folder, rank, local_rank, host, job)] = rank
        _wait(folder, children)
    finally:
        for process in children:
            os.kill(process, signal.SIGKILL)


def _fork(folder: Path, rank: int, local_rank: int, host: int, job: Job) -> int:
    process = os.fork()
    if process == 0:
        _become(folder, rank, local_rank, host, job)
    return process


def _become(folder: Path, rank: int, local_rank: int, host: int, job: Job) -> NoReturn:
    """Be a rank: with a log of its own, and nothing of the parent's clean-up."""
    code = 1
    end_with_parent()
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        places = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": host, "GROUP_RANK": host}
        sizes = {"WORLD_SIZE": job.stages, "LOCAL_WORLD_SIZE": job.stages // job.hosts}
        os.environ.update({name: str(value) for name, value in {**places, **sizes}.items()})
        work(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(folder: Path, children: dict[int, int]) -> None:
    """Until all ranks ended well.

    Raises:
        SystemExit: one did not.
    """
    while children:
        process, status = os.wait()
        rank, code = children.pop(process), os.waitstatus_to_exitcode(status)
        if code:
            (folder / FAILED).write_text(f"{rank} {code}")
            raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
