"""``asyncpp doctor`` that is told to end, or whose terminal is gone: the report is there, and nothing else is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from lightning_asyncpp.tools.doctor import doctor, parts
from lightning_asyncpp.tools.doctor.task import Task
from tests.tools.doctor_machines import CPUS
from tests.tools.test_doctor import HANGS, assert_is_ended, on_linux
from tests.workers import worker_context


def examine(folder: str, *part: str) -> None:
    """The doctor, whose parts run what is given in a Python process; its reports go to ``folder``."""

    def command_of(task: Task) -> list[str]:
        task.findings.add("before", "ok", "found before")
        CPUS.save(task.machine_file)
        return [sys.executable, *part]

    parts.command_of = command_of
    doctor.main(["--parts", "correctness", "--output", folder])


def examine_quietly(errors: str, folder: str, *part: str) -> None:
    """In a worker: as if it had been started with its stderr in a file, and with nothing to print to."""
    for name, descriptor in ((os.devnull, 1), (errors, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    examine(folder, *part)


@on_linux
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)],
)
def test_what_was_found_is_reported(number: signal.Signals, code: int, tmp_path: Path) -> None:
    pid = tmp_path / "child"
    arguments = (str(tmp_path / "errors"), str(tmp_path / "out"), "-c", HANGS, str(pid))
    process = worker_context().Process(target=examine_quietly, args=arguments, daemon=True)
    process.start()
    deadline = time.monotonic() + 60
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(pid.read_text())
    os.kill(process.pid, number)
    process.join(timeout=30)
    assert process.exitcode == code
    assert not (tmp_path / "errors").read_text()
    assert_is_ended(child)
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    first, second = content["parts"]
    assert [finding["status"] for finding in first["findings"]] == ["ok", "warning"]
    assert "interrupted after" in first["findings"][1]["text"]
    assert second["findings"][0]["text"] == "interrupted before it began"
    assert content["machine"]["python"] == CPUS.python
    text = (tmp_path / "out" / "report.md").read_text()
    assert "found before" in text
    assert "interrupted after" in text


def examine_unread(errors: str, folder: str) -> None:
    """In a worker: as if whoever read its stdout had gone."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    examine(folder, "-c", "")


def test_a_closed_stdout_does_not_end_the_examination(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "errors"), str(tmp_path / "out"))
    process = worker_context().Process(target=examine_unread, args=arguments, daemon=True)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0
    assert not (tmp_path / "errors").read_text()
    parts = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    assert [part["status"] for part in parts] == ["ok", "ok"]
