"""Two trainings that take turns, so that the machine's other work slows both of them alike."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

PATIENCE = 1800.0


@dataclass(frozen=True)
class Turns:
    """A training's side.

    Attributes:
        folder: of both trainings.
        name, other: what the trainings are called.
        before: steps before the first lap.
    """

    folder: str
    name: str
    other: str
    before: int

    def begin(self) -> None:
        """This training has the first turn."""
        self._give(self.name)

    def wait(self) -> None:
        """Sleep until it is this training's turn.

        Raises:
            TimeoutError: the other one never ended its lap.
        """
        deadline = time.monotonic() + PATIENCE
        while self._file.read_text() != self.name:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.other} did not end its lap within {PATIENCE} s")
            time.sleep(0.01)

    def pass_on(self) -> None:
        """All ranks have ended the lap: it is the other training's turn."""
        dist.barrier()
        if dist.get_rank() == 0:
            self._give(self.other)

    def _give(self, name: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(name)
        os.replace(new, self._file)

    @property
    def _file(self) -> Path:
        return Path(self.folder) / "turn"
