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

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("failing_script.py"))
PLAIN = [sys.executable, SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", SCRIPT]
LAUNCHERS = [pytest.param(PLAIN, id="lightning"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow)]
SECONDS = 30


class Launched:
    """A running script and the processes of its ranks, found by an argument that is unique to it."""

    def __init__(self, command: list[str], folder: Path, where: str = "nowhere") -> None:
        self.folder = folder
        self._output = (folder / "output").open("w")
        env = {k: v for k, v in os.environ.items() if k not in ("PL_GLOBAL_SEED",)}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, str(folder), where], stdout=self._output, stderr=self._output, env=env, start_new_session=True,
            cwd=folder,
        )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

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
def launched(command: list[str], folder: Path, where: str = "nowhere") -> Iterator[Launched]:
    run = Launched(command, folder, where)
    try:
        yield run
    finally:
        run.kill()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("rank", [*(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 1)), 2])
@pytest.mark.parametrize("command", LAUNCHERS)
def test_a_killed_rank_ends_all(command: list[str], rank: int, tmp_path: Path) -> None:
    """Rank 0 is the process that launched the others, where Lightning did."""
    with launched(command, tmp_path) as run:
        os.kill(run.pid_of(rank), signal.SIGKILL)
        assert run.ended() != 0
        assert "PeerLostError" in run.output
        assert "is gone" in run.output


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("where", ["loss", "layer"])
@pytest.mark.parametrize("command", LAUNCHERS)
def test_an_exception_on_one_rank_ends_all(command: list[str], where: str, tmp_path: Path) -> None:
    with launched(command, tmp_path, where) as run:
        assert run.ended(90) != 0
        assert "ArithmeticError: the user's own mistake" in run.output
        assert run.output.index("ArithmeticError") < run.output.index("PeerLostError")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("command", LAUNCHERS)
def test_sigterm_ends_all_after_a_common_batch(command: list[str], tmp_path: Path) -> None:
    with launched(command, tmp_path) as run:
        run.pid_of(0)
        os.kill(run.process.pid, signal.SIGTERM)
        run.ended()
        steps = [(tmp_path / f"{rank}.step").read_text() for rank in range(3)]
        assert len(set(steps)) == 1, steps
        assert steps[0].endswith("SIGTERMException")
