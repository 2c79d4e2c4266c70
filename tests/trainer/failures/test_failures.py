"""If a rank fails, is killed or gets SIGTERM, all processes end soon, with a nonzero exit code and a reported cause.

Run as a program, this file trains. Its arguments are a folder, in which every rank writes its process id and finally
its step and its error, and the number of the rank whose first layer fails.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_asyncpp import AsyncPipelineStrategy
from tests.helpers.trainer import Net, Run, Samples

PLAIN = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
SECONDS = 30.0
MISTAKE = "ArithmeticError: the user's own mistake"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def alive(folder: Path) -> list[int]:
    """Return the ids of processes that have the folder in their arguments, without zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until(true: Callable[[], bool], folder: Path, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, (folder / "output").read_text()
        time.sleep(0.1)


@contextmanager
def launched(command: list[str], folder: Path, fails: int = -1) -> Iterator[subprocess.Popen]:
    """Run this file as a program, and kill its remaining processes afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, __file__, str(folder), str(fails)], stdout=output, stderr=output, cwd=folder,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            for pid in alive(folder):
                os.kill(pid, signal.SIGKILL)
            process.wait(timeout=10)


def code_of(process: subprocess.Popen, folder: Path, seconds: float = SECONDS) -> int:
    """Wait until no process is left, and return the exit code of the first one."""
    wait_until(lambda: process.poll() is not None and not alive(folder), folder, seconds)
    return int(process.returncode)


def pid_of(rank: int, folder: Path) -> int:
    """Wait until all ranks train, and return the process id of one of them."""
    files = [folder / f"{number}.pid" for number in range(3)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), folder, seconds=150)
    return int(files[rank].read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(rank: int, tmp_path: Path) -> None:
    """A killed rank ends all processes, also if it is rank 0, which launched the others."""
    with launched(PLAIN, tmp_path) as process:
        os.kill(pid_of(rank, tmp_path), signal.SIGKILL)
        assert code_of(process, tmp_path) != 0
    assert f"rank {rank} (stage {2 - rank}) is gone: " in (tmp_path / f"{1 - rank}.error").read_text()


@pytest.mark.parametrize("command", [PLAIN, TORCHRUN], ids=["lightning", "torchrun"])
def test_an_exception_on_one_rank_ends_all(command: list[str], tmp_path: Path) -> None:
    with launched(command, tmp_path, fails=2) as process:
        assert code_of(process, tmp_path, seconds=180) != 0
    error, output = ((tmp_path / name).read_text().rstrip() for name in ("0.error", "output"))
    assert error.splitlines()[-1].strip() == MISTAKE, "users look at rank 0"
    assert f"PeerLostError: rank 2 (stage 0) failed first: {MISTAKE}\n" in error
    if command is PLAIN:
        assert MISTAKE in output.splitlines()[-1], "whichever rank ended last"


def test_sigterm_ends_all_after_a_common_batch(tmp_path: Path) -> None:
    with launched(PLAIN, tmp_path) as process:
        pid_of(0, tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        assert code_of(process, tmp_path) == 143
    (step,) = {(tmp_path / f"{rank}.step").read_text() for rank in range(3)}
    output = (tmp_path / "output").read_text()
    assert f"Stopped by SIGTERM after step {step}; nothing was saved" in output
    assert "Traceback" not in output


# -- the program --------------------------------------------------------------------------------------------------


class Reports(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(0.01)
        if index == 3:
            (self.folder / f"{trainer.global_rank}.pid").write_text(str(os.getpid()))

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.step").write_text(str(trainer.global_step))


def main(folder: Path, fails: int) -> None:
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0")

    def note_error(*error: Any) -> None:
        (folder / f"{rank}.error").write_text("".join(traceback.format_exception(*error)))
        sys.__excepthook__(*error)

    sys.excepthook = note_error
    module, forwards = Net(Run(Net)), itertools.count()

    def fail(*_: Any) -> None:
        if rank == fails and next(forwards) == 30:
            raise ArithmeticError("the user's own mistake")

    module.model[0].register_forward_hook(fail)  # type: ignore[index]
    trainer = L.Trainer(
        accelerator="cpu", devices=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        strategy=AsyncPipelineStrategy(timeout=timedelta(seconds=600)), callbacks=[Reports(folder)],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Samples(80_000), batch_size=8))


if __name__ == "__main__":
    L.seed_everything(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
