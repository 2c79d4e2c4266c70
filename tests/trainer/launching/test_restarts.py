"""torchrun restarts a run from its last checkpoint.

Run as a program, this file is such a run. Its arguments are an output folder and the signal that rank 1 sends itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.resumable import ONE_PROCESS, RESUMABLE_RUN, saving
from tests.helpers.trainer import Run, fit
from tests.trainer.checkpoint.test_preemption import Resumable

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
KILLED_AT = 7


def run_in(folder: Path) -> Run:
    """Return a run of 12 mini-batches in epochs of 5, with a checkpoint after every second mini-batch."""
    trainer = {"max_epochs": -1, "max_steps": 12, "enable_checkpointing": True, "gradient_clip_val": 0.5}
    callbacks = (saving(folder / "checkpoints", save_last=True, every_n_train_steps=2),)
    return replace(RESUMABLE_RUN, module=Resumable, trainer=trainer, callbacks=callbacks, val_samples=(20,))


class Killed(L.Callback):
    """Callback that records every start of the run on rank 1, and sends this rank the signal after the first start."""

    def __init__(self, folder: Path, number: int) -> None:
        self.started, self.number = folder / "started", number

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            with self.started.open("a") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == KILLED_AT and len(self.started.read_text().split()) == 1:
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_restarts_from_the_last_checkpoint(number: int, tmp_path: Path) -> None:
    """A killed run repeats the steps after its last checkpoint; one that is ended by SIGTERM repeats none."""
    command = ["timeout", "-k", "10", "250", *TORCHRUN, __file__, str(tmp_path), str(int(number))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    started = [int(step) for step in (tmp_path / "started").read_text().split()]
    assert started[0] == 0
    assert started[1] in ((6,) if number == signal.SIGKILL else (8, 9))
    parts = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    (whole,) = ONE_PROCESS.run(2, fit, run_in(tmp_path / "whole"))
    assert_equal_weights(joined_parts(parts), whole["weights"])


def main(folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    run = run_in(folder)
    killed = (Killed, {"folder": folder, "number": number})
    result = fit(replace(run, callbacks=(*run.callbacks, killed), ckpt_path="last"))
    np.savez(folder / f"{os.environ['RANK']}.npz", **result["weights"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
