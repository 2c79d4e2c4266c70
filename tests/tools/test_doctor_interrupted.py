"""``asyncpp doctor`` that is told to end, or whose terminal is gone: the report is there, and nothing else is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.doctor_machines import CPUS
from tests.tools.test_doctor import HANGS, assert_is_ended, on_linux

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from lightning_asyncpp.tools.doctor import doctor, parts
from tests.tools.doctor_machines import CPUS

def command_of(task):
    task.findings.add("before", "ok", "found before")
    CPUS.save(task.machine_file)
    return [sys.executable, *sys.argv[2:]]

parts.command_of = command_of
doctor.main(["--parts", "correctness", "--output", sys.argv[1]])
"""


def doctor(folder: Path, *part: str, stdout: int) -> subprocess.Popen[bytes]:
    """The doctor in a process of its own, whose parts do what is given; its reports go to ``folder``."""
    command = [sys.executable, "-c", SCRIPT, str(folder), *part]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, cwd=ROOT)


@on_linux
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)],
)
def test_what_was_found_is_reported(number: signal.Signals, code: int, tmp_path: Path) -> None:
    pid = tmp_path / "child"
    process = doctor(tmp_path / "out", "-c", HANGS, str(pid), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(pid.read_text())
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert not errors
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


def test_a_closed_stdout_does_not_end_the_examination(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = doctor(tmp_path / "out", "-c", "", stdout=writing)
    os.close(writing)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not errors
    parts = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    assert [part["status"] for part in parts] == ["ok", "ok"]
