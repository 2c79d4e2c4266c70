"""The parts of an examination, and how each is run: in a process of its own that cannot outlive its limit.

``python -m lightning_asyncpp.tools.doctor.parts FILE`` is that process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.task import MACHINE, Finding, Status, Task, worst
from lightning_asyncpp.tools.processes import run_limited, traced

_HERE = "lightning_asyncpp.tools.doctor"
_LOG_CHARACTERS = 200_000


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
    Part("correctness", "small pipelines against one process", f"{_HERE}.correctness", 230),
    Part("queues", "hardware queues and resident kernels", f"{_HERE}.queues", 50, needs_gpu=True),
    Part("stage", "one stage: speed, waits, memory, Muon", f"{_HERE}.stage_speed", 220),
)
"""In the order in which they run. Their limits, and what killing them may take, add up to ten minutes."""


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        part: which.
        findings: of it.
        seconds: that it took.
        log: what it and its processes printed; kept where something failed.
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
    parts: Sequence[Part],
    folder: Path,
    quick: bool,
    results: list[Result],
    tell: Callable[[Part, Finding], None] = lambda *_: None,
) -> None:
    """Run parts one after the other.

    Args:
        parts: which; the first one leaves what the machine is like.
        folder: where processes leave things for each other.
        quick: whether to do as little as says something.
        results: gets what became of each part, whatever ends the examination: of one that is interrupted what it had
            found, and of those behind that they were not reached.
        tell: is called with each finding, as soon as it is there.
    """
    try:
        for part in parts:
            if results and (reason := _cannot_run(part, parts[0], folder)):
                skipped = Finding(part.title, "skipped", reason)
                results.append(Result(part, [skipped], 0.0))
                tell(part, skipped)
            else:
                _run(part, folder, quick, results, tell)
    except BaseException:
        for part in parts[len(results) :]:
            results.append(Result(part, [Finding(part.title, "skipped", "interrupted before it began")], 0.0))
        raise


def _cannot_run(part: Part, first: Part, folder: Path) -> str:
    """Why a part is not tried; empty if it is."""
    if not (folder / MACHINE).exists() or not (machine := Machine.load(folder / MACHINE)).is_complete:
        return f"{first.name} did not come to its end, and this would most likely hang, too"
    if part.needs_gpu and not machine.gpus:
        return "no GPU on this machine"
    if part.needs_gpu and machine.hip:
        return "of AMD's GPUs nothing is known"
    return ""


def _run(part: Part, folder: Path, quick: bool, results: list[Result], tell: Callable[[Part, Finding], None]) -> None:
    task = Task(part.name, part.module, str(folder), quick, time.time() + part.limit)
    log = folder / f"{part.name}.log"
    told = 0

    def tell_new() -> None:
        nonlocal told
        for finding in task.findings.read()[told:]:
            tell(part, finding)
            told += 1

    started = time.monotonic()
    try:
        ended = run_limited(command_of(task), log, part.limit, tell_new)
    except BaseException:
        seconds = time.monotonic() - started
        task.findings.add(part.title, "warning", f"interrupted after {seconds:.0f} s; the rest of it was not reached")
        results.append(_result(part, task, log, seconds))
        raise
    if ended.code is None:
        text = f"took longer than {part.limit:.0f} s and was stopped; the log has a stack of each of its threads"
        fix = "report it with this file; `--parts` runs the others alone"
        if not ended.is_gone:
            fix = "a process waits in the driver and cannot be ended: `nvidia-smi`, and the kernel's log, may say why"
        task.findings.add(part.title, "failed", text, fix=fix)
    elif ended.code:
        task.findings.add(part.title, "failed", f"ended with exit code {ended.code}; its log says more")
    results.append(_result(part, task, log, ended.seconds))
    tell_new()


def _result(part: Part, task: Task, log: Path, seconds: float) -> Result:
    findings = task.findings.read()
    has_failed = worst(finding.status for finding in findings) in ("failed", "warning")
    text = shortened(log.read_text(errors="replace"), _LOG_CHARACTERS) if has_failed and log.exists() else ""
    return Result(part, findings, seconds, text)


def shortened(text: str, characters: int) -> str:
    """The beginning and the end of a text: what failed first, and how it ended."""
    if (left_out := len(text) - characters) <= 0:
        return text
    return f"{text[: characters // 2]}\n[... {left_out} characters ...]\n{text[-(characters // 2) :]}"


def command_of(task: Task) -> list[str]:
    """What does a task; where its threads are goes to the log shortly before it would be killed."""
    return traced(task.seconds_left(float("inf")), f"{_HERE}.parts", str(task.save()))


def work(path: Path) -> None:
    """Do a task."""
    task = Task(**json.loads(path.read_text(encoding="utf-8")))
    with task.findings.checking("the part itself"):
        importlib.import_module(task.module).run(task, task.findings)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    sys.stdout.flush()
    # Nothing is left to be done, and threads of libraries may wait for what never comes.
    os._exit(0)
