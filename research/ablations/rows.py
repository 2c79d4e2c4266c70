"""A row of an ablation: all that is fixed while learning rates and seeds vary; and the runs that belong to it."""

from __future__ import annotations

import re
from typing import NamedTuple

UNCORRECTED = "none"
Setting = tuple[str, "int | None"]
"""Text of a delay, and its stages."""


class Group(NamedTuple):
    """Rows that are compared with each other: an optimizer, at one momentum where that is varied, in one variant."""

    optimizer: str
    momentum: float | None
    variant: str | None

    @property
    def label(self) -> str:
        """Its name in plots."""
        momentum = [] if self.momentum is None else [f"momentum {self.momentum:g}"]
        return ", ".join([self.optimizer, *momentum, *([] if self.variant is None else [self.variant])])


class Row(NamedTuple):
    """A row of the grid; its fields are columns of ``results.csv``."""

    optimizer: str
    momentum: float | None
    variant: str | None
    delay: str
    stages: int | None
    correction: str

    @property
    def group(self) -> Group:
        """Optimizer, momentum and variant."""
        return Group(self.optimizer, self.momentum, self.variant)

    @property
    def setting(self) -> Setting:
        """Delay and stages."""
        return self.delay, self.stages

    @property
    def kind(self) -> str:
        """The delay without further settings: ``least`` of ``least microbatches=8``."""
        return self.delay.partition(" ")[0]

    @property
    def name(self) -> str:
        """Its name on the command line and in file names."""
        momentum = [] if self.momentum is None else [f"momentum{self.momentum:.12g}"]
        variant = [] if self.variant is None else [self.variant]
        stages = "" if self.stages is None else f"-stages{self.stages}"
        delay = f"delay{self.delay}".replace(" ", "-") + stages
        return "_".join([self.optimizer, *momentum, *variant, delay, self.correction])


class Key(NamedTuple):
    """Identity of a training within an ablation."""

    row: Row
    lr: float
    seed: int


class Run(NamedTuple):
    """A training that is over.

    Attributes:
        key: which.
        loss: last validation loss; NaN if the training diverged.
        steps: updates made.
        seconds: length of the training with its validations.
        cell: name of its folder and of its curves.
    """

    key: Key
    loss: float
    steps: int
    seconds: float
    cell: str


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key by which numbers in a text count as numbers, and before words."""
    parts = [part for part in re.split(r"(\d+)", text) if part]
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]


def with_setting(name: str, setting: Setting) -> str:
    """Return a name, and in brackets what the setting says besides its kind: ``"async (microbatches=4, stages=4)"``."""
    delay, stages = setting
    settings = [*delay.split(" ")[1:], *([] if stages is None else [f"stages={stages}"])]
    return f"{name} ({', '.join(settings)})" if settings else name
