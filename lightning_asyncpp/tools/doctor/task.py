"""What a part of the examination is told, and what it finds, which outlives the process that found it."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_asyncpp.tools.doctor.machine import Machine

Status = Literal["ok", "warning", "failed", "skipped"]
_WORST_FIRST: tuple[Status, ...] = ("failed", "warning", "ok", "skipped")
assert set(_WORST_FIRST) == set(get_args(Status))

MACHINE = "machine.json"
"""The file in which the first part leaves what the machine is like."""

_MARGIN_SECONDS = 5.0


class NoTimeLeftError(Exception):
    """The part's own time does not suffice for what was to be checked, which says nothing of it."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        title: what was checked.
        status: ``"skipped"`` if it was not; then ``text`` says why.
        text: what was found.
        figures: what was measured, plain values by names with their units.
        fix: what to do about it; empty if nothing.
    """

    title: str
    status: Status
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    fix: str = ""


def worst(statuses: Iterable[Status]) -> Status:
    """The one that decides; ``"skipped"`` if nothing was checked."""
    found = set(statuses)
    return next((status for status in _WORST_FIRST if status in found), "skipped")


class Findings:
    """Findings of one part, each in its file as soon as it is there: a part that is killed keeps what it found.

    Args:
        path: of the file, a line of JSON per finding.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self, title: str, status: Status, text: str = "", figures: dict[str, Any] | None = None, fix: str = ""
    ) -> None:
        """File a finding; arguments as the attributes of :class:`Finding`, figures that are no numbers as words."""
        plain = {name: value if _is_json(value) else str(value) for name, value in (figures or {}).items()}
        with self.path.open("a", encoding="utf-8") as file:
            # On a line of its own also behind one that was cut off.
            file.write("\n" + json.dumps(asdict(Finding(title, status, text, plain, fix))) + "\n")

    @contextmanager
    def checking(self, title: str, fix: str = "") -> Iterator[None]:
        """Turn what the body raises into a failed finding, or a skipped one for want of time.

        Where it was raised goes to the log.

        Args:
            title: what is checked.
            fix: what to do if it raises.
        """
        try:
            yield
        except NoTimeLeftError:
            self.add(title, "skipped", "no time was left for it")
        except Exception as error:
            traceback.print_exc()
            self.add(title, "failed", f"{type(error).__name__}: {error}", fix=fix)

    def read(self) -> list[Finding]:
        """All that is there; a line that was cut off by the end of its process is left out."""
        if not self.path.exists():
            return []
        *lines, _ = self.path.read_text(encoding="utf-8").split("\n")
        found = []
        for line in lines:
            with suppress(json.JSONDecodeError):
                found.append(Finding(**json.loads(line)))
        return found


def _is_json(value: Any) -> bool:
    """Whether every reader of JSON knows it: there is no NaN, and nothing infinite."""
    return not isinstance(value, float) or math.isfinite(value)


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
