"""What ``asyncpp doctor`` does on GPUs, as far as it can be seen without one: places, comparisons, queues, clocks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.tools.doctor import correctness, launching, queues, stage, stage_callback
from lightning_asyncpp.tools.doctor.cases import CASES, Place, make_trainer
from lightning_asyncpp.tools.doctor.comparing import judged, largest_difference
from lightning_asyncpp.tools.doctor.correctness import places_of
from lightning_asyncpp.tools.doctor.findings import Findings
from lightning_asyncpp.tools.doctor.launching import environment_of
from lightning_asyncpp.tools.doctor.stage_callback import StageClock
from lightning_asyncpp.tools.doctor.stage_recipe import peak_tflops, recipe_of, rows_of, size_of
from lightning_asyncpp.tools.doctor.task import Task
from tests.tools.doctor_machines import CPUS, with_gpus


@pytest.mark.parametrize(
    ("gpus", "nccl", "routes"),
    [
        (1, (2, 29, 7), {"shared": 3}),
        (1, (2, 30, 1), {"shared": 3, "nccl on one GPU": 2}),
        (2, (2, 29, 7), {"nccl": 1, "shared": 2}),
        (4, (2, 29, 7), {"nccl": 3}),
    ],
)
def test_places_are_those_of_the_machine(gpus: int, nccl: tuple[int, ...], routes: dict[str, int]) -> None:
    places, not_here = places_of(with_gpus(gpus, nccl=nccl))
    found = [place.route for place in places]
    assert {route: found.count(route) for route in routes} == routes
    assert len(found) == sum(routes.values())
    assert any("one GPU, over NCCL" in title for title in not_here) == ("nccl on one GPU" not in routes)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_lightning_accepts_every_place(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "0")
    places, _ = places_of(with_gpus(gpus, nccl=(2, 30, 7)))
    for place in [Place("shared", 0), *places]:
        trainer = make_trainer(CASES["tied"], place, 4, [])
        assert trainer.world_size == place.ranks
        assert trainer.num_nodes == place.nodes
        assert trainer.strategy.root_device == torch.device("cuda", 0)


def test_ranks_on_one_gpu_over_nccl_are_machines_of_their_own() -> None:
    place = Place("nccl on one GPU", 3)
    environments = [environment_of(place, rank, 1234) for rank in range(3)]
    assert [env["NODE_RANK"] for env in environments] == ["0", "1", "2"]
    assert {env["LOCAL_RANK"] for env in environments} == {"0"}
    assert (place.nodes, place.devices) == (3, 1)
    assert environments[0]["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environments[0]


def outcome(weight: float, val_loss: float | None = 2.0) -> dict[str, Any]:
    metrics = {} if val_loss is None else {"val_loss": val_loss}
    return {
        "weights": {"w": torch.tensor([1.0, weight])}, "start": {"w": torch.zeros(2)}, "metrics": metrics,
        "route": "2 stages; tensors travel between GPUs by NCCL", "seconds": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "is_exact", "status"),
    [
        (outcome(2.0), True, "ok"),
        (outcome(2.0000005), True, "failed"),
        (outcome(2.0005), False, "ok"),
        (outcome(2.1), False, "failed"),
        (outcome(float("nan")), False, "failed"),
        (outcome(2.0, val_loss=2.1), False, "failed"),
        (outcome(2.0, val_loss=None), False, "failed"),
    ],
)
def test_what_counts_as_equal(found: dict[str, Any], is_exact: bool, status: str) -> None:
    said = judged(CASES["layers"], found, outcome(2.0), is_exact)
    assert said[0] == status
    assert status != "ok" or "by NCCL" in said[1]


def test_a_weight_that_is_missing_differs() -> None:
    assert largest_difference({}, {"w": torch.ones(1)}, {"w": torch.zeros(1)}) == (float("inf"), "w")


@pytest.mark.parametrize(
    ("case", "error", "printed"),
    [
        ("raises", "rank-1 failed: ValueError: the first cause", "the first cause"),
        ("hangs", "no end within 4 s", "in wait_for_a_message_that_never_comes"),
    ],
)
def test_ranks_that_do_not_come_to_their_end_are_ended(
    case: str, error: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(launching, "_RANK", "tests.tools.doctor_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    given = Task("correctness", "", str(tmp_path), True, time.time() + 100)
    ran = launching.launch(given, Place("cpu", 2), [case], "here", 4.0 if case == "hangs" else 60.0)
    assert ran == launching.Ran({}, error)
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(("route", "status"), [("nccl", "failed"), ("nccl on one GPU", "warning")])
def test_a_place_that_hangs_is_said_with_the_case(
    route: Any, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = launching.Ran({"layers": outcome(2.0)}, "no end within 90 s")
    monkeypatch.setattr(correctness, "launch", lambda *_: ran)
    given = Task("correctness", "", str(tmp_path), True, time.time() + 100)
    correctness.compare(given, Place(route, 3), dict.fromkeys(CASES, outcome(2.0)), given.findings, "here")
    fine, hung = given.findings.read()
    assert fine.status == "ok"
    assert hung.status == status
    assert "stopped at 'flushed': no end within 90 s" in hung.text
    assert hung.fix


class FakeCuda:
    """Streams that share hardware queues: what is behind in a queue waits for all that is before it."""

    def __init__(self, num_queues: int) -> None:
        self.num_queues, self.now, self.current, self.made = num_queues, 0, 0, 0
        self.queues = [0] * num_queues  # when each is done

    def Stream(self) -> Any:  # noqa: N802
        number, self.made = self.made, self.made + 1
        return SimpleNamespace(number=number, synchronize=lambda: self.wait(self.queues[number % self.num_queues]))

    default_stream = Stream

    def Event(self) -> Any:  # noqa: N802
        event = SimpleNamespace(time=0)
        event.record = lambda stream: setattr(event, "time", self.queues[stream.number % self.num_queues])
        event.query = lambda: event.time <= self.now
        return event

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.number
        yield
        self.current = before

    def _sleep(self, cycles: int) -> None:
        queue = self.current % self.num_queues
        self.queues[queue] = max(self.now, self.queues[queue]) + cycles

    def wait(self, until: int) -> None:
        self.now = max(self.now, until)

    def synchronize(self) -> None:
        self.wait(max(self.queues))


@pytest.mark.parametrize(("num_queues", "pairs"), [(8, 0), (1, 56), (4, 8)])
def test_streams_that_share_a_queue_are_found(
    num_queues: int, pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "torch", SimpleNamespace(cuda=FakeCuda(num_queues)))
    waits = queues.held_up(queues._streams())
    assert sum(map(sum, waits)) == pairs
    assert all(waits[i][j] == (i != j and i % num_queues == j % num_queues) for i in range(8) for j in range(8))
    findings = Findings(tmp_path / "found")
    queues._judge_queues(waits, findings)
    (finding,) = findings.read()
    assert finding.status == ("warning" if pairs else "ok")
    assert finding.figures["pairs"] == pairs


def test_waits_of_the_host_are_counted_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(stage_callback, "peaks", lambda _: {"allocated": 1, "reserved": 2})
    clock = StageClock(str(tmp_path / "found.json"), warm_up=2, measured=3, watched=2)
    for index in range(8):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        clock.on_train_batch_end(None, None, None, None, index)
    clock.on_train_end(SimpleNamespace(), SimpleNamespace(flops_per_token=7.0))  # type: ignore[arg-type]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["waits"] == 1
    ((place, count),) = found["places"].items()
    assert "test_doctor_gpu_parts.py" in place
    assert count == 2
    assert modes == ["warn", "default"]
    assert found["seconds"] >= 0


SECONDS = {"eager": 0.5, "plain": 0.4, "compiled": 0.3, "bf16": 0.25, "plain-compiled": 0.3}


def test_a_stage_on_a_gpu_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(given: Task, module: list[str], name: str, result: Path, limit: float = 0.0) -> str:
        if name == "muon":
            ours = {
                "milliseconds": {"median": 2.0},
                "speed_over_torch": {"median": 1.5},
                "difference": {"relative": 0.01},
            }
            systems = {"ours": ours, "torch": {"milliseconds": {"median": 3.0}}}
            result.write_text(json.dumps({"systems": systems}))
            return ""
        if name == "bf16":
            return "exit code 1: it does not compile"
        found = {"seconds": SECONDS[name], "allocated": 4 * 2**30, "reserved": 5 * 2**30, "flops_per_token": 1e9}
        if "plain" not in name:
            found |= {"waits": 3.0, "places": {"here.py:7": 9}}
        result.write_text(json.dumps(found))
        return ""

    monkeypatch.setattr(stage, "_run", run)
    monkeypatch.setattr(stage, "_planned", lambda *_: 5 * 2**30)
    given = Task("stage", "", str(tmp_path), False, time.time() + 300)
    with_gpus(1).save(given.machine_file)
    stage.run(given, given.findings)
    found = {finding.title: finding for finding in given.findings.read()}
    eager = found["one stage, eager, bf16-mixed"]
    assert eager.figures["tokens_per_second"] == 131072
    assert eager.figures["mfu"] == pytest.approx(131072e9 / 989e12, abs=1e-4)
    assert found["waits of the host, eager, bf16-mixed"].status == "warning"
    assert found["memory, planned and real, eager, bf16-mixed"].status == "warning"
    assert found["Muon's step, beside torch.optim.Muon's"].figures["speed_over_torch"] == 1.5
    assert found["one stage, compiled, bf16-mixed, weight_dtype bf16"].status == "warning"
    assert found["one stage beside a plain loop, eager"].status == "warning"
    assert found["one stage beside a plain loop, compiled"].status == "ok"


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", None), ("NVIDIA A100-SXM4-40GB", 312), ("Tesla T4", None)],
)
def test_peaks_of_known_gpus(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.slow
def test_the_recipes_can_be_planned(tmp_path: Path) -> None:
    for machine in (CPUS, with_gpus(1)):
        for row in rows_of(machine, quick=False):
            path = tmp_path / f"{row.name}.yaml"
            recipe = recipe_of(row, size_of(machine), bool(machine.gpus), tmp_path / "found.json")
            path.write_text(json.dumps(recipe))
            assert 2**20 < stage._planned(path, bool(machine.gpus)) < 20 * 2**30


INTERPRETED = """
import torch
from lightning_asyncpp.tools.doctor import spin
zeros = torch.zeros
spin.torch.zeros = lambda size, device: zeros(size)
made = []
spin.torch.zeros = lambda size, device: made.append(zeros(size)) or made[-1]
spin.spin(2, 3)
expected = ((0.5 * 0.999 + 0.5) * 0.999 + 0.5)
torch.testing.assert_close(made[0], torch.full((2 * spin.BLOCK,), expected))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_the_spinning_kernel_interpreted_on_a_cpu_turns_and_ends() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
