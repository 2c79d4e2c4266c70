"""``asyncpp doctor``: nothing outlives its limit, what is wrong is said, and the report holds it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools import processes
from lightning_asyncpp.tools.doctor import doctor, parts
from lightning_asyncpp.tools.doctor.doctor_report import as_json, as_markdown, summary
from lightning_asyncpp.tools.doctor.installation import VARIABLES, judged
from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.parts import PARTS, Part, Result, examine
from lightning_asyncpp.tools.doctor.task import Finding, Findings, Task
from lightning_asyncpp.tools.processes import last_error, run_limited
from tests.tools.doctor_machines import CPUS, H100, with_gpus

# A child in a session of its own that ignores SIGTERM, and a parent that does so, too.
HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True)
open(sys.argv[1] + ".part", "w").write(str(child.pid))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def assert_is_ended(pid: int) -> None:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system does not tell who descends from whom"
)


@on_linux
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    ended = run_limited([sys.executable, "-c", HANGS, str(tmp_path / "child")], tmp_path / "log", 2.0)
    assert ended.code is None
    assert ended.is_gone
    assert ended.seconds < 10
    assert_is_ended(int((tmp_path / "child").read_text()))


def test_what_cannot_be_ended_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.3)
    monkeypatch.setattr(processes, "_descendants", lambda _: [2**22 + 1])  # no such process: pids are smaller
    assert not run_limited([sys.executable, "-c", ""], tmp_path / "log", 60.0).is_gone


def test_a_child_that_cannot_be_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        pid = 2**22 + 1

        def poll(self) -> None:
            return None

        def terminate(self) -> None:
            pass

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None
            raise subprocess.TimeoutExpired("stuck", timeout)

    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.1)
    with processes.Children(tmp_path) as children:
        children._running["stuck"] = Stuck()  # type: ignore[assignment]


def test_a_command_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    ended = run_limited([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", 60.0)
    assert ended.code == 3
    assert ended.seconds < 30


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "Traceback\n[rank0]: exc.InductorError: ImportError: too short\n\n[rank0]: Set X=1 for more\n",
            "InductorError",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n at exit\n", "out of memory"),
        ("Seed set to 1\nKilled\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_the_line_that_names_the_error_is_found(log: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert said in last_error(tmp_path / "log")


PART = Part("hanging", "a part that hangs", "nowhere", 2.0)


def test_a_part_that_hangs_keeps_what_it_found_and_the_rest_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command_of(given: Task) -> list[str]:
        given.findings.add("before", "ok", "found before it hung")
        return [sys.executable, "-c", "import time; print('and here it was', flush=True); time.sleep(600)"]

    monkeypatch.setattr(parts, "command_of", command_of)
    told: list[str] = []
    results: list[Result] = []
    examine([PART, PARTS[1]], tmp_path, True, results, lambda _, finding: told.append(finding.title))
    first, second = results
    assert [finding.status for finding in first.findings] == ["ok", "failed"]
    assert "longer than 2 s" in first.findings[1].text
    assert "and here it was" in first.log
    assert [finding.status for finding in second.findings] == ["skipped"]
    assert told == ["before", PART.title, PARTS[1].title]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (CPUS, "no GPU on this machine"),
        (with_gpus(1, hip="7.0"), "of AMD's GPUs nothing is known"),
        (
            replace(CPUS, is_complete=False),
            "hanging did not come to its end, and this would most likely hang, too",
        ),
    ],
)
def test_a_part_for_gpus_alone_is_not_started_without(
    machine: Machine, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command_of(given: Task) -> list[str]:
        given.findings.add("the machine", "ok")
        machine.save(given.machine_file)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(parts, "command_of", command_of)
    results: list[Result] = []
    examine([PART, PARTS[2]], tmp_path, True, results)
    assert results[0].status == "ok"
    assert [(finding.status, finding.text) for finding in results[1].findings] == [("skipped", reason)]


def test_a_part_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "command_of", lambda _: [sys.executable, "-c", "import os; os.abort()"])
    results: list[Result] = []
    examine([PART], tmp_path, True, results)
    (result,) = results
    assert result.status == "failed"
    assert "exit code -6" in result.findings[0].text


def test_what_a_part_raises_is_a_finding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = Task("broken", "tests.tools.no_such_part", str(tmp_path), True, time.time() + 60)
    parts.work(given.save())
    (finding,) = given.findings.read()
    assert finding.status == "failed"
    assert "no_such_part" in finding.text
    assert "Traceback" in capfd.readouterr().err  # for the log


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found")
    findings.add("whole", "ok", figures={"ms": 1.5, "difference": float("nan")})
    with findings.path.open("a") as file:
        file.write('{"title": "cut o')
    assert findings.read() == [whole := Finding("whole", "ok", "", {"ms": 1.5, "difference": "nan"})]
    findings.add("behind it", "ok")
    assert findings.read() == [whole, Finding("behind it", "ok")]


def wrong(machine: Machine) -> dict[str, Finding]:
    return {finding.title: finding for finding in judged(machine) if finding.status in ("failed", "warning")}


@pytest.mark.parametrize("machine", [CPUS, with_gpus(1), with_gpus(8)], ids=["cpus", "one", "eight"])
def test_nothing_is_wrong_where_nothing_is(machine: Machine) -> None:
    assert wrong(machine) == {}


WRONG: dict[str, tuple[Machine, str, str]] = {
    "one-queue": (with_gpus(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), "environment", "warning"),
    "blocking": (with_gpus(environment={"CUDA_LAUNCH_BLOCKING": "1"}), "environment", "warning"),
    "no-torch-for-it": (with_gpus(0, gpus=[], cuda=""), "versions", "failed"),
    "hidden": (with_gpus(0, gpus=[], environment={"CUDA_VISIBLE_DEVICES": "-1"}), "versions", "warning"),
    "not-hidden": (with_gpus(0, gpus=[], environment={"CUDA_VISIBLE_DEVICES": "11"}), "versions", "failed"),
    "amd": (with_gpus(hip="7.0"), "AMD", "warning"),
    "no-nccl": (with_gpus(nccl=None), "versions", "failed"),
    "no-triton": (with_gpus(packages=CPUS.packages), "triton", "warning"),
    "no-gcc": (with_gpus(c_compiler=""), "triton", "warning"),
    "no-headers": (with_gpus(has_headers=False), "triton", "warning"),
    "no-compiler": (with_gpus(compiler=""), "compiler", "warning"),
    "in-use": (with_gpus(1, gpus=[replace(H100, free_gib=20.0)]), "GPU 0", "warning"),
    "old": (with_gpus(1, gpus=[replace(H100, capability=(7, 5), shared_memory_kib=64)]), "GPU 0", "warning"),
    "unlike": (with_gpus(gpus=[H100, replace(H100, name="NVIDIA A100")]), "different GPUs", "warning"),
    "apart": (with_gpus(peer_access=[[True, False], [False, True]]), "peer access", "warning"),
    "interface": (with_gpus(environment={"GLOO_SOCKET_IFNAME": "ib7"}), "network", "failed"),
    "container": (with_gpus(shm_gib=0.0625), "/dev/shm", "warning"),
    "unreadable": (with_gpus(errors={"topology": "TimeoutExpired: 20 s"}), "reading topology", "failed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_a_fix(name: str) -> None:
    machine, title, status = WRONG[name]
    found = wrong(machine)
    assert list(found) == [title]
    assert found[title].status == status
    assert found[title].fix


def test_a_machine_travels_between_processes(tmp_path: Path) -> None:
    machine = with_gpus(2)
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


def results() -> list[Result]:
    fine = Finding("versions", "ok", "torch 2.14.1", {"torch": "2.14.1"})
    table = Finding("hardware queues", "warning", "shared", {"pairs": " . X\n X ."}, "more queues")
    failed = Finding("2 stages", "failed", "no end within 90 s", {"seconds": 90.0}, "NCCL_DEBUG=INFO")
    skipped = Finding("over NCCL", "skipped", "it takes 3 GPUs, and there are 2")
    return [
        Result(PARTS[0], [fine], 4.0),
        Result(PARTS[1], [failed, skipped], 95.0, "rank 1: in recv\n```"),
        Result(PARTS[2], [table], 3.0),
    ]


def test_the_report_holds_everything() -> None:
    machine = with_gpus(2)
    text = as_markdown(results(), machine, quick=True)
    content = json.loads(json.dumps(as_json(results(), machine, quick=True)))
    assert content["status"] == "failed"
    assert [part["status"] for part in content["parts"]] == ["ok", "failed", "warning"]
    assert content["machine"]["gpus"][0]["sms"] == 132
    assert content["not_checked"] == [{"what": "over NCCL", "why": "it takes 3 GPUs, and there are 2"}]
    for part in (
        "2 x NVIDIA H100 80GB HBM3",
        "**failed**: 2 stages",
        "To do: NCCL_DEBUG=INFO.",
        "rank 1: in recv",
        "X .",
    ):
        assert part in text
    assert text.count("```") == 4  # the log's own fence does not end it
    assert "over NCCL: it takes 3 GPUs" in text.partition("## Not checked on this machine")[2]
    assert "more queues" in summary(results())
    assert "The machine could not be looked at" in as_markdown([], None, quick=False)


def test_all_parts_together_take_ten_minutes_at_most() -> None:
    assert sum(part.limit + processes.KILL_SECONDS for part in PARTS) <= 600


@pytest.mark.parametrize("arguments", [["--parts", "nothing"], ["--output", __file__], ["--quik"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(arguments)
    assert end.value.code == 2


@pytest.mark.parametrize(("statuses", "code"), [(["ok", "warning", "skipped"], 0), (["ok", "failed"], 1)])
def test_only_what_failed_ends_with_code_1(
    statuses: list[Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding(f"check {index}", status) for index, status in enumerate(statuses)]
    monkeypatch.setattr(doctor, "examine", lambda *given: given[3].append(Result(PARTS[0], found, 1.0)))
    ended = 0
    try:
        doctor.main(["--output", str(tmp_path / "out")])
    except SystemExit as end:
        ended = int(str(end.code))
    assert ended == code
    assert (tmp_path / "out" / "report.md").exists()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["machine"] is None
    assert "report.md" in capsys.readouterr().out


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    doctor.main(["--parts", "installation", "--output", str(tmp_path)])
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["status"] == "warning"
    assert content["machine"]["packages"]["torch"]
    assert "warning  environment: CUDA_DEVICE_MAX_CONNECTIONS=1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_quick_examination_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    doctor.main(["--quick", "--output", str(tmp_path)])
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["status"] != "failed"
    correctness = {part["name"]: part["findings"] for part in content["parts"]}["correctness"]
    assert sum(finding["status"] == "ok" for finding in correctness) >= 8
    assert content["not_checked"]


def test_the_page_explains_every_variable() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "gpus.md").read_text(encoding="utf-8")
    assert not [variable.name for variable in VARIABLES if not re.search(rf"`{variable.name}[`=]", page)]


@pytest.mark.parametrize("name", ["report.md", "report.json"])
def test_what_cannot_be_written_is_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "examine", lambda chosen, folder, quick, found, say: found.extend(results()[:1]))
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--output", str(tmp_path)])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert f"{tmp_path / name} cannot be written (Is a directory)" in printed
    assert "versions" in printed or "Installation" in printed or "installation" in printed
    assert ("# asyncpp doctor" in printed) == (name == "report.md")
    other = tmp_path / ({"report.md", "report.json"} - {name}).pop()
    assert other.read_text()
