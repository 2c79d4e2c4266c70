"""After a fault anywhere, all ranks end in time and say why, and a resumed run equals an undisturbed one.

``pytest tests/faults`` runs two scenarios, and ``pytest -m slow tests/faults -n 2 --dist load`` runs 26 more. The
environment variable ``FAULT_SCENARIOS`` sets the total number, 28 by default.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lightning_asyncpp.storage import load
from research.benchmarks import link
from tests.faults import disk, network
from tests.faults.jobs import JOBS, TIMEOUT_SECONDS, Job
from tests.faults.launch import Ended, launch
from tests.faults.places import Fault
from tests.faults.scenario import ERRORS, GONE, MISTAKES, TOLD, Scenario, draw
from tests.helpers.resumable import write_litdata

LEAVE_SECONDS = 15.0  # time in which a rank has to end once it is told, doubled for a busy machine
START_SECONDS = 90.0
MANY = int(os.environ.get("FAULT_SCENARIOS", "28"))
USUAL = (1, 2)  # raise and kill, but not stop, which waits for a timeout

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes by /proc")


class Undisturbed(NamedTuple):
    """Outcome of a job without a fault: the results of its ranks, and the size of its checkpoints in bytes."""

    results: list[dict[str, Any]]
    size: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains the data."""
    folder = tmp_path_factory.mktemp("faults")
    write_litdata(folder / "data", 37)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[str], Undisturbed]:
    @functools.cache
    def run(name: str) -> Undisturbed:
        checkpoints = folder / f"{name}-checkpoints"
        checkpoints.mkdir()
        results = launch(JOBS[name], folder / name, checkpoints, limit=START_SECONDS, is_counted=True).results()
        return Undisturbed(results, disk.size_of(checkpoints))

    return run


SCENARIOS = [
    pytest.param(scenario, marks=[] if seed in USUAL else [pytest.mark.slow], id=str(scenario))
    for seed, scenario in enumerate(map(draw, range(MANY)))
]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_end_and_a_resumed_run_is_the_undisturbed_one(
    scenario: Scenario, undisturbed: Callable[[str], Undisturbed], folder: Path, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    if why := {"small": disk.why_not, "cut": link.missing}.get(scenario.what, str)():
        pytest.skip(why)
    record_property("what", scenario.what)
    job, whole = scenario.job, undisturbed(scenario.job.name)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (tmp_path / "data").symlink_to(folder / "data")
    is_small = scenario.what == "small"
    size = int((0.1 + 0.8 * scenario.share) * whole.size)
    with disk.small(checkpoints, size) if is_small else contextlib.nullcontext():
        ended, fault = disturbed(scenario, whole, tmp_path / "disturbed", checkpoints)
        record_property("seconds", ended.seconds)
        check_end(scenario, ended, fault)
        check_checkpoints(scenario, checkpoints)
        if is_small:
            disk.grow(checkpoints)
        again = launch(job, tmp_path / "again", checkpoints, limit=START_SECONDS).results()
        check_resumed(job, again, whole.results, ended, fault)


def disturbed(scenario: Scenario, whole: Undisturbed, folder: Path, checkpoints: Path) -> tuple[Ended, Fault | None]:
    """Run the job with the scenario's fault; return its outcome and the fault (None for a small disk)."""
    counts = [result["counts"] for result in whole.results]
    start = functools.partial(launch, scenario.job, folder, checkpoints)
    if scenario.what == "small":
        return start(limit=START_SECONDS), None
    limit = TIMEOUT_SECONDS + LEAVE_SECONDS
    if scenario.what == "cut":
        limit += TIMEOUT_SECONDS + 15.0  # before the ranks have met, two calls of torch's store may time out
        with network.two_hosts() as (hosts, process):
            fault = scenario.fault(counts, process)
            return start(fault, limit=limit, hosts=hosts), fault
    fault = scenario.fault(counts)
    return start(fault, limit=limit), fault


def check_end(scenario: Scenario, ended: Ended, fault: Fault | None) -> None:
    """Check that no rank wrongly exits with 0, and that outputs name the first cause."""
    assert fault is None or ended.happened(fault.rank), f"did not happen: {fault}\n{ended.outputs()}"
    ranks = range(scenario.job.processes)
    begun = all(ended.reached(rank) is not None for rank in ranks)
    if scenario.what in TOLD and begun:
        assert set(ended.codes) in ({143}, {0}), ended.outputs()
        return
    fine = [rank for rank in ranks if ended.codes[rank] == 0]
    assert fine == ([fault.rank] if fault is not None and fault.what == "leave" else []), ended.outputs()
    if scenario.what in ERRORS or fault is None:
        for rank in ranks:
            last = ended.output(rank).rstrip().splitlines()[-1]
            assert MISTAKES[scenario.what] in last, f"rank {rank}, of {fault}:\n{ended.outputs()}"
    elif scenario.what in GONE and begun:
        for rank in set(ranks) - {fault.rank}:
            assert "is gone" in ended.output(rank), f"rank {rank}, of {fault}:\n{ended.outputs()}"


def check_checkpoints(scenario: Scenario, checkpoints: Path) -> None:
    """Check that all checkpoints are complete, and that failed saves left no partial files."""
    for path in checkpoints.glob("*.ckpt"):
        load(path)
    if scenario.what in ERRORS:
        assert not list(checkpoints.glob(".*.partial"))


def without_epoch_means(trail: list[Any]) -> list[Any]:
    """Return the records without epoch means, which begin anew after a resume, as Lightning's do."""
    return [e for e in trail if not (isinstance(e, tuple) and any(str(name).endswith("_epoch") for name in e[-1]))]


def check_resumed(
    job: Job, again: list[dict[str, Any]], whole: list[dict[str, Any]], ended: Ended, fault: Fault | None
) -> None:
    """Check that the resumed run lost few steps, and that its further records and weights are bitwise the same."""
    start, steps = again[0]["start"], whole[0]["step"]
    assert {result["start"] for result in again} == {start}
    assert [result["step"] for result in again] == [steps] * job.processes
    reached = min((ended.reached(rank) or 0) for rank in range(job.processes))
    assert start >= (reached - 1) // job.save_every * job.save_every - job.save_every, f"{reached} reached, {fault}"
    for mine, expected in zip(again, whole, strict=True):
        for name, trail in expected["trails"].items():
            tail, trail = without_epoch_means(mine["trails"][name]), without_epoch_means(trail)
            assert tail == trail[len(trail) - len(tail) :], f"{name} from step {start}, after {fault}"
            assert tail or not trail or start == steps, f"{name} from step {start}, after {fault}"
        numbers = expected["trails"].get("numbers", [])
        assert len(mine["trails"].get("numbers", [])) * steps == len(numbers) * (steps - start), fault
        assert mine["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert np.array_equal(mine["weights"][name], weight), f"{name}, after {fault}"
