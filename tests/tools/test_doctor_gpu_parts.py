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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.tools.doctor import case_ranks, correctness, queues, stage_training
from lightning_asyncpp.tools.doctor.case_ranks import environment_of
from lightning_asyncpp.tools.doctor.cases import CASES, Place, make_trainer
from lightning_asyncpp.tools.doctor.correctness import judged, largest_difference, places_of
from lightning_asyncpp.tools.doctor.stage_training import StageClock
from lightning_asyncpp.tools.doctor.task import Findings, Task
from tests.tools.doctor_machines import CPUS, with_gpus
from tests.tools.forked_ranks import ForkedChildren


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
    for place in [Place("shared", 2, alone=True), *places]:
        trainer = make_trainer(CASES["tied"], place, [])
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


def test_ranks_on_one_gpu_over_nccl_talk_over_loopback_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    variables = environment_of(Place("nccl on one GPU", 2), 0, 1234)
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in variables
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert environment_of(Place("nccl on one GPU", 2), 0, 1234)["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "GLOO_SOCKET_IFNAME" not in environment_of(Place("nccl", 2), 0, 1234)


@pytest.mark.parametrize(("gpus", "routes"), [(1, []), (2, ["nccl"]), (4, ["nccl"] * 3)])
def test_gpus_that_take_one_process_each_are_not_shared(gpus: int, routes: list[str]) -> None:
    places, not_here = places_of(with_gpus(gpus, nccl=(2, 30, 1), is_exclusive=True))
    assert [place.route for place in places] == routes
    assert "nvidia-smi -c DEFAULT" in not_here["2 stages on one GPU, over NCCL"]


def outcome(weight: float, val_loss: float | None = 2.0, saved: float = 3.0) -> dict[str, Any]:
    metrics = {} if val_loss is None else {"val_loss": val_loss}
    return {
        "weights": {"w": torch.tensor([1.0, weight])}, "start": {"w": torch.zeros(2)}, "metrics": metrics,
        "saved": {"step of w": torch.tensor(saved)},
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
        (outcome(2.0, saved=3.0000003), True, "failed"),
        (outcome(2.0, saved=3.001), False, "ok"),
        (outcome(2.0, saved=4.0), False, "failed"),
        (outcome(2.0) | {"saved": {}}, False, "failed"),
    ],
)
def test_what_counts_as_equal(found: dict[str, Any], is_exact: bool, status: str) -> None:
    said = judged(replace(CASES["layers"], saves=True), found, outcome(2.0), is_exact)
    assert said[0] == status
    assert status != "ok" or "by NCCL" in said[1]


def test_a_checkpoint_that_was_never_saved_is_not_equal() -> None:
    nothing = outcome(2.0) | {"saved": {}}
    assert judged(CASES["adamw"], nothing, nothing, True)[0] == "failed"
    assert judged(CASES["layers"], nothing, nothing, True)[0] == "ok"


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
    monkeypatch.setattr(case_ranks, "_RANK", "tests.tools.doctor_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    given = Task("correctness", "", str(tmp_path), True, time.time() + 100)
    ran = case_ranks.launch(given, Place("cpu", 2), [case], "here", 4.0 if case == "hangs" else 60.0)
    assert ran == case_ranks.Ran({}, error)
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(("route", "status"), [("nccl", "failed"), ("nccl on one GPU", "warning")])
def test_a_place_that_hangs_is_said_with_the_case(
    route: Any, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = case_ranks.Ran({"layers": outcome(2.0) | {"saved": {}}}, "no end within 90 s")
    monkeypatch.setattr(correctness, "launch", lambda *_: ran)
    given = Task("correctness", "", str(tmp_path), True, time.time() + 100)
    correctness.compare(
        given, Place(route, 3), dict.fromkeys(CASES, outcome(2.0) | {"saved": {}}), given.findings, "here"
    )
    fine, hung = given.findings.read()
    assert fine.status == "ok"
    assert hung.status == status
    assert "stopped at 'flushed': no end within 90 s" in hung.text
    assert hung.fix


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_there_is_no_time_for_is_not_started(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_ranks, "Children", None)
    given = Task("correctness", "", str(tmp_path), True, time.time() + 20)
    with given.findings.checking("2 stages"):
        correctness.compare(given, Place("cpu", 2, replicas), {}, given.findings, "here")
    (finding,) = given.findings.read()
    assert (finding.status, finding.text) == ("skipped", "no time was left for it")


def test_a_place_whose_time_the_part_cut_short_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_ranks, "_RANK", "tests.tools.doctor_rank")
    monkeypatch.setattr(case_ranks, "_LEAST_SECONDS", 1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    given = Task("correctness", "", str(tmp_path), True, time.time() + 7)
    with given.findings.checking("2 stages"):
        correctness.compare(given, Place("cpu", 2), {}, given.findings, "here")
    (finding,) = given.findings.read()
    assert (finding.status, finding.text) == ("skipped", "no time was left for it")


def test_without_a_process_to_compare_with_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "launch", lambda *_: case_ranks.Ran({}, "rank-0 failed: ValueError"))
    given = Task("correctness", "", str(tmp_path), True, time.time() + 100)
    with_gpus(8).save(given.machine_file)
    correctness.run(given, given.findings)
    found = given.findings.read()
    assert {finding.title for finding in found if "rank-0 failed: ValueError" in finding.text} == {
        f"{stages} stages a GPU for each, over NCCL" for stages in (2, 3)
    }
    assert {finding.status for finding in found} == {"failed", "skipped"}


def test_pipelines_on_cpus_train_what_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_ranks, "Children", ForkedChildren)
    monkeypatch.setattr(correctness, "CASES", {name: CASES[name] for name in ("layers", "flushed", "adamw")})
    monkeypatch.setattr(correctness, "places_of", lambda _: ([Place("cpu", 2)], {}))
    given = Task("correctness", "", str(tmp_path), True, time.time() + 100)
    CPUS.save(given.machine_file)
    correctness.run(given, given.findings)
    assert [finding.status for finding in given.findings.read()] == ["ok"] * 4


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


def test_a_host_that_was_held_up_once_is_no_shared_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "torch", SimpleNamespace(cuda=FakeCuda(8)))
    answers = iter([True] + [False] * 200)
    monkeypatch.setattr(queues, "_is_held_up", lambda *_: next(answers))
    assert sum(map(sum, queues.held_up(queues._streams()))) == 0


def test_the_spinning_kernel_is_left_out_where_triton_cannot_launch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "torch", SimpleNamespace(cuda=FakeCuda(8)))
    monkeypatch.setattr(FakeCuda, "set_device", lambda *_: None, raising=False)
    given = Task("queues", "", str(tmp_path), False, time.time() + 60)
    with_gpus(1, has_headers=False).save(given.machine_file)
    queues.run(given, given.findings)
    assert [finding.status for finding in given.findings.read()] == ["ok", "skipped"]


def test_products_take_about_as_long_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_products_ms", lambda a, products: 0.2 * products)
    assert queues._num_products(torch.empty(0)) == 150
    monkeypatch.setattr(queues, "_products_ms", lambda a, products: 90.0 * products)
    assert queues._num_products(torch.empty(0)) == 1


def test_waits_of_the_host_are_counted_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(stage_training, "now", iter((10.0, 16.0)).__next__)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(stage_training, "peaks", lambda _: {"allocated": 1, "reserved": 2})
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
    assert found["seconds"] == 2.0  # of 3 mini-batches


INTERPRETED = """
import torch
from lightning_asyncpp.tools.doctor import spin
zeros, made = torch.zeros, []
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
