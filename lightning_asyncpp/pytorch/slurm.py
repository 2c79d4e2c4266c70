"""The requeue of a SLURM job whose run was ended by the signal that announces the end of its time."""

from __future__ import annotations

import os
import re
import subprocess

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn


def requeue_signal(trainer: L.Trainer) -> int | None:
    """The signal upon which the job is to be requeued; None if it is not, or this is no SLURM job."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def requeue_job() -> None:
    """Put this job into the queue again (``scontrol requeue``); call it on one rank, when everything is saved.

    What goes wrong is a warning: the checkpoint is there.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        rank_zero_warn(f"the job is not requeued: SLURM_JOB_ID={job!r} is no number of a job")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        rank_zero_warn(f"job {job} is not requeued: scontrol cannot be run ({error})")
        return
    if done.returncode:
        rank_zero_warn(f"job {job} is not requeued: scontrol ended with {done.returncode}: {done.stderr.strip()}")
    else:
        rank_zero_info(f"Requeued job {job}")
