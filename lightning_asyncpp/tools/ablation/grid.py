"""What an ablation speaks of: trainings, the rows of the grid that they belong to, and the lines of its CSV files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

UNCORRECTED = "none"
Setting = tuple[str, "int | None"]
"""Text of a delay, and its stages: what a recipe lists under ``delays``."""


@dataclass(frozen=True)
class Group:
    """What is compared within itself: an optimizer, at one momentum where that is swept, in one variant of the base."""

    optimizer: str
    momentum: float | None
    variant: str | None = None

    @property
    def label(self) -> str:
        """Its name in plots."""
        momentum = [] if self.momentum is None else [f"momentum {self.momentum:g}"]
        return ", ".join([self.optimizer, *momentum, *([] if self.variant is None else [self.variant])])


@dataclass(frozen=True)
class Row:
    """A row of the grid: all that is fixed while learning rates and seeds vary."""

    group: Group
    delay: str
    stages: int | None
    correction: str

    @property
    def setting(self) -> Setting:
        """Its delay and stages."""
        return self.delay, self.stages

    @property
    def kind(self) -> str:
        """The delay without further settings."""
        return kind_of(self.delay)

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        stages = [] if self.stages is None else [f"{self.stages} stages"]
        correction = [] if self.correction == UNCORRECTED else [self.correction]
        return ", ".join([self.group.label, f"delay {self.delay}", *stages, *correction])

    @property
    def uncorrected(self) -> Row:
        """The same row without its correction."""
        return replace(self, correction=UNCORRECTED)

    def columns(self) -> dict[str, Any]:
        """What the lines of its trainings in CSV files have in common."""
        return {
            "optimizer": self.group.optimizer, "correction": self.correction, "delay": self.delay,
            "stages": self.stages, "momentum": self.group.momentum, "variant": self.group.variant,
        }  # fmt: skip


@dataclass(frozen=True)
class CellKey:
    """Identity of a training."""

    row: Row
    lr: float
    seed: int


# How a column of numbers is written, and which numbers it holds, if not every finite one.
_DIGITS = {"form": ".12g"}
_LEARNING_RATE = _DIGITS | {"kind": "positive"}


@dataclass(frozen=True)
class Run:
    """A training that is over; its fields are the columns of ``results.csv``.

    Attributes:
        table: name of the ablation.
        optimizer, correction: names from its recipe.
        delay: ``"0"``, ``"1"``, ``"pipedream"``, ..., further settings appended as ``key=value``.
        stages: of an emulated pipeline; None where the delay does not depend on it.
        momentum: None unless it is swept.
        lr: learning rate.
        seed: of weights and data order.
        status: ``finished`` or ``diverged``.
        loss: last validation loss; None if the run diverged.
        steps: updates made.
        seconds: duration of the training.
        cell: name of the run's folder and of its curves.
        variant: of the base recipe; None where there is only one.
    """

    table: str
    optimizer: str
    correction: str
    delay: str
    stages: int | None
    momentum: float | None = field(metadata=_DIGITS)
    lr: float = field(metadata=_LEARNING_RATE)
    seed: int
    status: str
    loss: float | None
    steps: int
    seconds: float = field(metadata={"form": ".2f"})
    cell: str
    variant: str | None = None

    @property
    def row(self) -> Row:
        """The row of the grid that this run belongs to."""
        return Row(Group(self.optimizer, self.momentum, self.variant), self.delay, self.stages, self.correction)


@dataclass(frozen=True)
class Open:
    """A training of the recipe that has no result; its fields are the columns of ``open.csv``.

    Attributes:
        optimizer, correction, delay, stages, momentum: as those of a run.
        lr: learning rate; None if it is that of another row, whose search is not over.
        seed: of weights and data order; None where ``lr`` is: the line stands for all seeds.
        status: ``failed``, or ``pending`` if it is still to be run.
        log: path of the log of a failed one.
        variant: as that of a run.
    """

    optimizer: str
    correction: str
    delay: str
    stages: int | None
    momentum: float | None = field(metadata=_DIGITS)
    lr: float | None = field(metadata=_LEARNING_RATE)
    seed: int | None
    status: str
    log: str
    variant: str | None = None

    @property
    def row(self) -> Row:
        """The row of the grid that it belongs to."""
        return Row(Group(self.optimizer, self.momentum, self.variant), self.delay, self.stages, self.correction)

    @property
    def failed(self) -> bool:
        """Whether it was run and failed; else it is still to be run."""
        return self.status == "failed"


@dataclass(frozen=True)
class CurvePoint:
    """A value during a training, no finite one where it diverges; its fields are the columns of ``curves.csv``."""

    cell: str
    step: int
    metric: str
    value: float = field(metadata={"kind": "any"})


def kind_of(delay: str) -> str:
    """A delay's text without further settings: ``"1"`` of ``"1 micro_batches=4"``."""
    return re.split(r"[\s,;]", delay, maxsplit=1)[0]


def natural(text: str) -> list[tuple[bool, int, str]]:
    """An order of texts in which numbers count as such, and come before words."""
    parts = [part for part in re.split(r"(\d+)", text) if part]
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]


def without_start(delay: str) -> str:
    """A delay's text without a synchronous start: ``"1"`` of ``"1 synchronous_start=60"``."""
    return re.sub(r"[\s,;]*\bsynchronous_start=\d+", "", delay)


def further(setting: Setting) -> Setting:
    """What a delay sets besides itself: ``("micro_batches=4", None)`` of ``("1 micro_batches=4", None)``."""
    delay, stages = setting
    return delay[len(kind_of(delay)) :].strip(" ,;\t"), stages


def named(name: str, setting: Setting) -> str:
    """A name, and in brackets what the delay sets besides itself: ``"async (micro_batches=4)"``."""
    text, stages = further(setting)
    settings = [*([text] if text else []), *([] if stages is None else [f"stages={stages}"])]
    return f"{name} ({', '.join(settings)})" if settings else name
