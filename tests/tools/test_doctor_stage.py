"""The stage of ``asyncpp doctor``: what is said of its rows, and of those for which there is no room or no time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.doctor import stage_speed
from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.stage_recipe import peak_tflops, recipe_of, rows_of, size_of
from lightning_asyncpp.tools.doctor.task import Task
from lightning_asyncpp.tools.processes import Ended, run_limited, traced
from tests.tools.doctor_machines import CPUS, H100, with_gpus

SECONDS = {"eager": 0.5, "plain": 0.4, "compiled": 0.3, "bf16": 0.25, "plain-compiled": 0.3}


def test_a_stage_on_a_gpu_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(given: Task, module: list[str], name: str, result: Path, limit: float = 0.0) -> str:
        if name == "bf16":
            return "exit code 1: it does not compile"
        found = {"seconds": SECONDS[name], "allocated": 4 * 2**30, "reserved": 5 * 2**30, "flops_per_token": 1e9}
        if "plain" not in name:
            found |= {"waits": 3.0, "places": {"here.py:7": 9}}
        result.write_text(json.dumps(found))
        return ""

    monkeypatch.setattr(stage_speed, "_run", run)
    monkeypatch.setattr(stage_speed, "_planned", lambda *_: 5 * 2**30)
    given = Task("stage", "", str(tmp_path), False, time.time() + 300)
    with_gpus(1).save(given.machine_file)
    stage_speed.run(given, given.findings)
    found = {finding.title: finding for finding in given.findings.read()}
    eager = found["one stage, eager, bf16-mixed"]
    assert eager.figures["tokens_per_second"] == 131072
    assert eager.figures["mfu"] == pytest.approx(131072e9 / 989e12, abs=1e-4)
    assert found["waits of the host, eager, bf16-mixed"].status == "warning"
    assert found["memory, planned and real, eager, bf16-mixed"].status == "warning"
    assert found["one stage, compiled, bf16-mixed, weight_dtype bf16"].status == "warning"
    assert found["one stage beside a plain loop, eager"].status == "warning"
    assert found["one stage beside a plain loop, compiled"].status == "ok"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA L40S", 362),
        ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA H100 PCIe", None),
        ("Tesla T4", None),
        ("NVIDIA H100 NVL", None), ("NVIDIA H200 NVL", None), ("NVIDIA GH200 480GB", None), ("NVIDIA GB200", None),
        ("NVIDIA RTX A1000 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)  # fmt: skip
def test_peaks_of_known_gpus(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.slow
def test_the_recipes_can_be_planned(tmp_path: Path) -> None:
    for machine in (CPUS, with_gpus(1), with_gpus(1, gpus=[replace(H100, free_gib=7.0)])):
        for row in rows_of(machine):
            path = tmp_path / f"{row.name}.yaml"
            recipe = recipe_of(row, size_of(machine), bool(machine.gpus), tmp_path / "found.json")
            path.write_text(json.dumps(recipe))
            assert 2**20 < stage_speed._planned(path, bool(machine.gpus)) < 20 * 2**30


@pytest.mark.parametrize(
    ("machine", "sequences"),
    [
        (with_gpus(1), 4),
        (with_gpus(1, gpus=[replace(H100, free_gib=11.0)]), 1),
        (with_gpus(1, gpus=[replace(H100, name="Tesla T4", free_gib=14.5, capability=(7, 5))]), 1),
    ],
)
def test_a_small_or_old_gpu_gets_smaller_batches(machine: Machine, sequences: int) -> None:
    size = size_of(machine)
    assert size.sequences == sequences
    assert size.tokens == sequences * size.micro_batches * 2048


def run_row(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Ended,
    log: str,
    seconds: float = 300.0,
    machine: Machine = CPUS,
) -> tuple[list[Any], dict[str, str]]:
    """Findings of the first row where its process ends so, and the environment that the process got."""
    environments: list[dict[str, str]] = []

    def limited(command: list[str], path: Path, limit: float, environment: Mapping[str, str]) -> Ended:
        environments.append(dict(environment))
        path.write_text(log)
        return ended

    monkeypatch.setattr(stage_speed, "run_limited", limited)
    given = Task("stage", "", str(folder), False, time.time() + seconds)
    machine.save(given.machine_file)
    stage_speed._measure(given, machine, size_of(machine), rows_of(machine)[0], {}, given.findings)
    return given.findings.read(), environments[0] if environments else {}


@pytest.mark.parametrize(
    ("ended", "log", "seconds", "status", "text"),
    [
        (Ended(1, 9.0), "ValueError: broken", 300.0, "failed", "ValueError: broken"),
        (Ended(1, 9.0), "torch.OutOfMemoryError: CUDA out of memory.", 300.0, "warning", "out of memory"),
        (Ended(None, 75.0), "", 300.0, "warning", "no end within 75 s"),
        (Ended(None, 40.0), "", 45.0, "skipped", "no time was left for it"),
        (Ended(0, 1.0), "", 15.0, "skipped", "no time was left for it"),
    ],
)
def test_what_is_too_large_or_too_slow_is_not_wrong(
    ended: Ended, log: str, seconds: float, status: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,), _ = run_row(tmp_path, monkeypatch, ended, log, seconds)
    assert finding.status == status
    assert text in finding.text


def test_a_driver_that_torch_cannot_use_is_out_of_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(1, 1.0)
    assert run_row(tmp_path, monkeypatch, ended, "", machine=CPUS)[1]["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in run_row(tmp_path, monkeypatch, ended, "", machine=with_gpus(1))[1]


def test_compiled_code_is_kept_for_the_next_row_unless_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = run_row(tmp_path, monkeypatch, Ended(1, 1.0), "")
    cache = Path(first["TRITON_CACHE_DIR"])
    cache.mkdir()
    _, second = run_row(tmp_path, monkeypatch, Ended(1, 1.0), "")
    assert first == second
    assert cache.exists()
    run_row(tmp_path, monkeypatch, Ended(None, 75.0), "")
    assert not cache.exists()


def test_what_quick_leaves_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_measure", "_compare_memory"):
        monkeypatch.setattr(stage_speed, name, lambda *_: None)
    given = Task("stage", "", str(tmp_path), True, time.time() + 300)
    with_gpus(1).save(given.machine_file)
    stage_speed.run(given, given.findings)
    assert [finding.title for finding in given.findings.read()] == [
        "one stage, a plain loop, compiled, bf16", "one stage, compiled, bf16-mixed, weight_dtype bf16",
    ]  # fmt: skip


def test_a_stage_that_hangs_leaves_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(
        "import sys, time\ndef in_the_driver():\n    time.sleep(600)\n"
        "print(sys.argv[1:], __name__, flush=True)\nin_the_driver()"
    )
    command = traced(1.0, "hangs", "--as", "given")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{tmp_path}")

    class SeenError(Exception):
        pass

    def look() -> None:
        if "in in_the_driver" in (tmp_path / "log").read_text():
            raise SeenError

    with pytest.raises(SeenError):
        run_limited(command, tmp_path / "log", 60.0, look)
    assert "['--as', 'given'] __main__" in (tmp_path / "log").read_text()
