"""The parts of an examination, and how each is run: in a process of its own that cannot outlive its limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_asyncpp.tools.doctor import task as task_module
from lightning_asyncpp.tools.doctor.findings import Finding, Status, worst
from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.running import run_limited
from lightning_asyncpp.tools.doctor.task import MACHINE, Task

_HERE = "lightning_asyncpp.tools.doctor"
_LOG_CHARACTERS = 24_000


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: by which it is chosen.
        title: what it is about.
        module: whose ``run(task, findings)`` does it.
        limit: seconds after which it is killed.
        needs_gpu: whether there is nothing to do without one.
    """

    name: str
    title: str
    module: str
    limit: float
    needs_gpu: bool = False


INSTALLATION = Part("installation", "installation and machine", f"{_HERE}.installation", 60)
PARTS = (
    INSTALLATION,
    Part("correctness", "small pipelines against one process", f"{_HERE}.correctness", 240),
    Part("queues", "hardware queues and resident kernels", f"{_HERE}.queues", 60, needs_gpu=True),
    Part("stage", "one stage: speed, waits, memory, Muon", f"{_HERE}.stage", 220),
)
"""In the order in which they run. Their limits add up to less than ten minutes."""


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        part: which.
        findings: of it.
        seconds: that it took.
        log: the end of what it and its processes printed; kept where something failed.
    """

    part: Part
    findings: list[Finding]
    seconds: float
    log: str = ""

    @property
    def status(self) -> Status:
        """The one of its findings that decides."""
        return worst(finding.status for finding in self.findings)


def examine(
    parts: Sequence[Part], folder: Path, quick: bool, tell: Callable[[Part, Finding], None] = lambda *_: None
) -> list[Result]:
    """Run parts one after the other.

    Args:
        parts: which; the first one leaves what the machine is like.
        folder: where processes leave things for each other.
        quick: whether to do as little as says something.
        tell: is called with each finding, as soon as it is there.
    """
    results: list[Result] = []
    for part in parts:
        if results and (reason := _cannot_run(part, parts[0], folder)):
            skipped = Finding(part.title, "skipped", reason)
            tell(part, skipped)
            results.append(Result(part, [skipped], 0.0))
        else:
            results.append(_run(part, folder, quick, tell))
    return results


def _cannot_run(part: Part, first: Part, folder: Path) -> str:
    """Why a part is not tried; empty if it is."""
    if not (folder / MACHINE).exists():
        return f"{first.name} did not come to its end, and this would most likely hang, too"
    if part.needs_gpu and not Machine.load(folder / MACHINE).gpus:
        return "no GPU on this machine"
    return ""


def _run(part: Part, folder: Path, quick: bool, tell: Callable[[Part, Finding], None]) -> Result:
    task = Task(part.name, part.module, str(folder), quick, time.time() + part.limit)
    log = folder / f"{part.name}.log"
    told = 0

    def tell_new() -> None:
        nonlocal told
        for finding in task.findings.read()[told:]:
            tell(part, finding)
            told += 1

    ended = run_limited(command_of(task), log, part.limit, tell_new)
    if ended.code is None:
        text = f"took longer than {part.limit:.0f} s and was stopped; the log has a stack of each of its threads"
        fix = "report it with this file; `--parts` runs the others alone"
        if not ended.is_gone:
            fix = "a process waits in the driver and cannot be ended: `nvidia-smi`, and the kernel's log, may say why"
        task.findings.add(part.title, "failed", text, fix=fix)
    elif ended.code:
        task.findings.add(part.title, "failed", f"ended with exit code {ended.code}; its log says more")
    tell_new()
    findings = task.findings.read()
    has_failed = worst(finding.status for finding in findings) in ("failed", "warning")
    text = log.read_text(errors="replace")[-_LOG_CHARACTERS:] if has_failed else ""
    return Result(part, findings, ended.seconds, text)


def command_of(task: Task) -> list[str]:
    """What does a task."""
    return [sys.executable, "-m", task_module.__name__, str(task.save())]
