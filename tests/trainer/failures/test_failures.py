"""Whatever happens to one rank, all processes end, soon, with an exit code that says so and the cause on record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("failing_script.py"))
PLAIN = [sys.executable, SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", SCRIPT]
SECONDS = 30
TIMEOUT = 20.0  # until all have started, too


class Launched:
    """A running script and the processes of its ranks, found by an argument that is unique to it."""

    def __init__(self, command: list[str], folder: Path, where: str, timeout: float) -> None:
        self.folder = folder
        self._output = (folder / "output").open("w")
        env = {k: v for k, v in os.environ.items() if k not in ("PL_GLOBAL_SEED",)}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, str(folder), where, str(timeout)], stdout=self._output, stderr=self._output, env=env,
            start_new_session=True, cwd=folder,
        )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def error(self, rank: int) -> str:
        """What ended the script of a rank, as its user sees it."""
        path = self.folder / f"{rank}.error"
        assert path.exists(), f"rank {rank} did not say why it ended:\n{self.output}"
        return path.read_text()

    def alive(self) -> list[int]:
        """Process ids of everything that was started with our folder as an argument; zombies do not count."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def pid_of(self, rank: int, patience: float = 150.0) -> int:
        """The process of a rank, once all ranks train."""
        end = time.monotonic() + patience
        while not all((self.folder / f"{r}.pid").exists() for r in range(3)):
            assert time.monotonic() < end, f"training did not start:\n{self.output}"
            assert self.process.poll() is None, f"ended before it trained:\n{self.output}"
            time.sleep(0.05)
        return int((self.folder / f"{rank}.pid").read_text())

    def ended(self, seconds: float = SECONDS) -> int:
        """Wait until no process is left; the exit code of the first one."""
        end = time.monotonic() + seconds
        while self.process.poll() is None or self.alive():
            assert time.monotonic() < end, f"still alive after {seconds} s: {self.alive()}\n{self.output}"
            time.sleep(0.1)
        return int(self.process.returncode)

    def kill(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        self._output.close()


@contextmanager
def launched(command: list[str], folder: Path, where: str = "nowhere", timeout: float = 600.0) -> Iterator[Launched]:
    run = Launched(command, folder, where, timeout)
    try:
        yield run
    finally:
        run.kill()


pytestmark = pytest.mark.timeout(280)


@pytest.mark.parametrize(
    ("command", "rank"),
    [
        pytest.param(PLAIN, 1, id="lightning-1", marks=pytest.mark.slow),
        pytest.param(PLAIN, 0, id="lightning-0", marks=pytest.mark.slow),  # the process that launched the others
        pytest.param(TORCHRUN, 2, id="torchrun-2", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_all(command: list[str], rank: int, tmp_path: Path) -> None:
    with launched(command, tmp_path) as run:
        os.kill(run.pid_of(rank), signal.SIGKILL)
        assert run.ended() != 0
        survivor = 0 if rank else 1
        if command is not PLAIN and not (tmp_path / f"{survivor}.error").exists():
            assert "Signal 9 (SIGKILL)" in run.output, "the launcher was quicker to end it, and says so"
            return
        assert f"rank {rank} (stage {2 - rank}) is gone: " in run.error(survivor)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_others_by_the_timeout(tmp_path: Path) -> None:
    with launched(PLAIN, tmp_path, timeout=TIMEOUT) as run:
        stopped = run.pid_of(1)
        os.kill(stopped, signal.SIGSTOP)
        end = time.monotonic() + TIMEOUT + SECONDS
        while not (tmp_path / "0.error").exists():
            assert time.monotonic() < end, run.output
            time.sleep(0.1)
        os.kill(stopped, signal.SIGKILL)
        assert run.ended(90) != 0
        assert "is gone: its process was killed, crashed, was stopped, or ended" in run.error(0)


@pytest.mark.slow
@pytest.mark.parametrize("command", [PLAIN, TORCHRUN], ids=["lightning", "torchrun"])
@pytest.mark.parametrize(("where", "rank"), [("callback", 0), ("layer", 2)])
def test_an_exception_on_one_rank_ends_all(command: list[str], where: str, rank: int, tmp_path: Path) -> None:
    with launched(command, tmp_path, where) as run:
        assert run.ended(180) != 0
        mistake = "ArithmeticError: the user's own mistake"
        assert run.error(0).rstrip().splitlines()[-1].strip() == mistake, "users look at rank 0"
        if rank:
            assert f"PeerLostError: rank {rank} (stage {2 - rank}) failed first: {mistake}\n" in run.error(0)
        if command is PLAIN:
            assert mistake in run.output.rstrip().splitlines()[-1], "whichever rank ended last"


@pytest.mark.slow
def test_sigterm_ends_all_after_a_common_batch(tmp_path: Path) -> None:
    with launched(PLAIN, tmp_path) as run:
        run.pid_of(0)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.ended() == 143
        steps = {(tmp_path / f"{rank}.step").read_text() for rank in range(3)}
        assert len(steps) == 1, steps
        assert f"Stopped by SIGTERM after step {steps.pop()}; nothing was saved" in run.output
        assert "Traceback" not in run.output
