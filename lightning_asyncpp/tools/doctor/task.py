"""What a part of the examination is told, and the process that it runs in: ``python -m ...doctor.task FILE``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_asyncpp.tools.doctor.findings import Findings, NoTimeLeftError
from lightning_asyncpp.tools.doctor.machine import Machine

MACHINE = "machine.json"
"""The file in which the first part leaves what the machine is like."""

_MARGIN_SECONDS = 5.0


@dataclass(frozen=True)
class Task:
    """One part's share of the examination.

    Attributes:
        name: of the part, and of its files.
        module: whose ``run(task, findings)`` does it.
        folder: where processes leave things for each other.
        quick: whether to do as little as says something.
        ends: by ``time.time()``, when the process is killed.
    """

    name: str
    module: str
    folder: str
    quick: bool
    ends: float

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def machine_file(self) -> Path:
        """Where the first part leaves what it finds."""
        return self.path / MACHINE

    @property
    def machine(self) -> Machine:
        """What the first part found."""
        return Machine.load(self.machine_file)

    @property
    def findings(self) -> Findings:
        """Where this part's findings go."""
        return Findings(self.path / f"{self.name}.jsonl")

    def seconds_left(self, at_most: float) -> float:
        """How long something inside the part may take, so that there is time to say that it took too long."""
        return max(0.0, min(at_most, self.ends - time.time() - _MARGIN_SECONDS))

    def seconds_for(self, limit: float, least: float) -> tuple[float, bool]:
        """How long something inside the part may take, and whether that is less than its own limit.

        Args:
            limit: its own, in seconds.
            least: with less it is not worth the start.

        Raises:
            NoTimeLeftError: there is not that much.
        """
        seconds = self.seconds_left(limit)
        if seconds < min(limit, least):
            raise NoTimeLeftError
        return seconds, seconds < limit

    def save(self) -> Path:
        """Write it for the process that does it."""
        path = self.path / f"{self.name}.task.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


def work(path: Path) -> None:
    """Do a task; where its threads are goes to the log shortly before it would be killed."""
    task = Task(**json.loads(path.read_text(encoding="utf-8")))
    if (left := task.seconds_left(float("inf"))) > 0:
        faulthandler.dump_traceback_later(left, exit=False)
    with task.findings.checking("the part itself"):
        importlib.import_module(task.module).run(task, task.findings)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    sys.stdout.flush()
    # Nothing is left to be done, and threads of libraries may wait for what never comes.
    os._exit(0)
