"""Tiny runs of the benchmarks: what they print and write, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span
from lightning_asyncpp.tools.bench.bench import main
from lightning_asyncpp.tools.bench.harness import measure as measuring
from lightning_asyncpp.tools.bench.harness.comparison import costs_of_extras, costs_text, facts_line, summarise, table
from lightning_asyncpp.tools.bench.harness.hosts import BenchmarkFailedError
from lightning_asyncpp.tools.bench.harness.job import Job, RankRun
from lightning_asyncpp.tools.bench.harness.measure import Measured, measure
from lightning_asyncpp.tools.bench.harness.stage_layers import jitter_factor
from lightning_asyncpp.tools.bench.harness.systems import _strategy
from lightning_asyncpp.tools.bench.names import (
    ASYNC,
    ASYNC_2BW,
    ASYNC_EXACT,
    ASYNC_MONITORED,
    ASYNC_SLACK_1,
    ASYNC_TRACED,
    EXTRAS,
    FLOOR,
    INTERLEAVED,
    ONE_F_ONE_B,
    RIVALS,
    SPLIT_BACKWARD,
    SYNC,
    TITLES,
    ZBV,
)
from lightning_asyncpp.tools.text import Spread
from tests.tools.forked_ranks import ForkedChildren

TINY = ["--stages", "2", "--mini-batches", "3", "--warm-up", "2", "--repeats", "1", "--timeout", "200"]


# What torch 2.11 says of its schedule over gloo; later ones run it.
DEFECTS = {ZBV: "Pair is not connected"}


def defective(failures: dict[str, str]) -> set[str]:
    """Rivals that this version of torch cannot run, and nothing else."""
    assert all(DEFECTS.get(name, "none is known") in reason for name, reason in failures.items()), failures
    return set(failures)


def check_systems(results: dict[str, Any], systems: set[str]) -> None:
    assert set(results["systems"]) == systems - defective(results["failures"])
    for line in results["systems"].values():
        assert line["utilisation"] is None or 0 < line["utilisation"]["median"] <= 1
        assert 0 < line["milliseconds"]["min"] <= line["milliseconds"]["median"] <= line["milliseconds"]["max"]
    assert results["systems"][ONE_F_ONE_B]["gain"]["median"] == 1.0
    assert results["systems"][FLOOR]["of_floor"]["median"] == 1.0
    assert {"cpu_count", "torch", "lightning"} <= set(results["machine"])


def test_schedule_prints_a_table_and_writes_json_spans_and_a_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "Children", ForkedChildren)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "svg")}
    outputs = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    sizes = ["--micro-batches", "2", "--forward-ms", "2", "--backward-ms", "4"]
    systems = (ASYNC, SYNC, ONE_F_ONE_B, FLOOR)
    main(["schedule", *TINY, *sizes, *outputs, "--systems", *systems])
    printed = capsys.readouterr().out
    assert all(TITLES[name] in printed for name in systems)
    results = json.loads(files["json"].read_text())
    check_systems(results, set(systems))
    assert results["costs"] == {}
    assert results["systems"]["floor"]["milliseconds"]["median"] >= 2 * 6
    spans = json.loads(files["trace"].read_text())["spans"]
    assert [len(spans["async"]), len(spans["sync"])] == [2, 2]
    assert {kind for lane in spans["async"] for kind, *_ in lane} == {"F", "B", "U"}
    ElementTree.parse(files["svg"])


@pytest.mark.slow
def test_the_price_of_every_extra_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ["--micro-batches", "2", "--forward-ms", "2", "--backward-ms", "4", "--json", str(file)]
    main(["schedule", *TINY, *sizes, "--systems", ASYNC, ONE_F_ONE_B, FLOOR, "--also", *EXTRAS])
    printed = capsys.readouterr().out
    assert all(f"{extra} costs " in printed for extra in EXTRAS.values())
    results = json.loads(file.read_text())
    check_systems(results, {ASYNC, ONE_F_ONE_B, FLOOR, *EXTRAS})
    assert set(results["costs"]) == set(EXTRAS)


@pytest.mark.slow
def test_compute_calibrates_and_reports_the_ideal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ["--micro-batches", "2", "--target-ms", "2", "--rows", "16", "--width", "16"]
    systems = [ASYNC, ONE_F_ONE_B, INTERLEAVED, ZBV, FLOOR]
    also = [ASYNC_MONITORED, ASYNC_2BW, ASYNC_SLACK_1]
    main(["compute", *TINY, *sizes, "--systems", *systems, "--also", *also, "--json", str(file)])
    (results,) = json.loads(file.read_text())
    check_systems(results, {*systems, *also})
    assert set(results["costs"]) == set(also)
    assert ZBV in results["failures"] or results["systems"][ZBV]["utilisation"] is None
    assert results["systems"][INTERLEAVED]["utilisation"] is not None
    assert results["ideal_gain"] == 1.5
    assert results["facts"]["blocks"] >= 1
    printed = capsys.readouterr().out
    assert all(f"{EXTRAS[extra]} costs " in printed for extra in also)
    assert "gain / ideal" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'; there are schedule, "),
        (["schedule", "--stages", "1"], "at least 2 stages"),
        (["schedule", "--stages", "4", "--micro-batches", "3"], "use micro_batches >= 4"),
        (["schedule", "--stages", "4", "--micro-batches", "4", "--lookahead", "3"], "lookahead=3 does not fit"),
        (["schedule", "--forward-ms", "-1"], "forward"),
        (["schedule", "--repeats", "0"], "repeats"),
        (["compute", "--micro-batches", "2", "1"], "use micro_batches >= 2"),
        (["schedule", "--systems", "1f1b", "zbw", "async", "--stages", "1"], "zbw: unknown; there are async, "),
        (["schedule", "--systems", "zbw", "--stages", "1"], "at least 2 stages"),
        (["schedule", "--systems", "zbv", "zbv"], "zbv: named more than once"),
        (
            ["compute", "--also", "clip", "async", "--stages", "1"],
            "--also clip async: unknown; there are async+2bw, async+slack1, ",
        ),
        (["schedule", "--systems", "1f1b", "--also", "async+monitor", "--stages", "4", "--micro-batches", "3"], ">= 4"),
        (["schedule", "--systems", "1f1b", "--also", "async+monitor"], "--systems lacks: add it"),
        (["schedule", "--also", "async+trace", "--svg", "x.svg"], "every system records"),
        (["network", "--also", "async+trace"], "async+trace: unknown; there are async+2bw, async+slack1, "),
        (["network", "--systems", "sync", "--also", "async+slack1"], "--systems lacks: add it"),
        (["schedule", "--jitter", "-0.1"], "jitter"),
        (["schedule", "--weight-share", "1.5"], "weight"),
        (["schedule", "--link-latency-ms", "5"], "use --hosts 2"),
        (["schedule", "--hosts", "3"], "--hosts 3: there are 1 or 2"),
        (["draw"], "svg"),
        (["draw", "--svg", "x.svg", "--stages", "two"], "stages"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("schedule", "compute", "draw"))


@pytest.mark.slow
def test_a_failing_process_ends_the_benchmark_with_its_message() -> None:
    with pytest.raises(BenchmarkFailedError, match="KeyError: 'unheard of'"):
        measure(Job("sleep", 2, 2, ("unheard of",), repeats=1, mini_batches=1), timeout=100)


@pytest.mark.slow
def test_all_systems_sleep_the_same_for_each_micro_batch_and_zero_bubble_in_two_parts() -> None:
    systems = (ASYNC, *RIVALS, FLOOR)
    job = Job("sleep", 2, 4, systems, 1, 2, 1, forward_ms=2.0, backward_ms=6.0, jitter=0.5)
    measured = measure(job, timeout=200)
    assert set(measured.runs) == {*systems} - defective(measured.failures)
    for system, ((*ranks,),) in measured.runs.items():
        parts = {Kind.FORWARD: 1, Kind.BACKWARD: 1}
        if system in RIVALS[2:]:
            parts = {Kind.FORWARD: 2, Kind.BACKWARD: 4 if system in SPLIT_BACKWARD else 2}
        for stage, run in enumerate(ranks):
            assert run.stage == stage
            expected = [(kind, k) for kind, count in parts.items() for k in range(16) for _ in range(count)]
            assert sorted((span.kind, span.index) for span in run.bodies) == sorted(expected)
            for kind, index in expected:
                nominal = {Kind.FORWARD: 2e-3, Kind.BACKWARD: 6e-3}[kind] * jitter_factor(0.5, 0, stage, index, kind)
                slept = sum(s.end - s.start for s in run.bodies if (s.kind, s.index) == (kind, index))
                assert nominal <= slept  # how much longer depends on the machine


@pytest.mark.slow
def test_a_rival_that_cannot_run_gets_a_line_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    # Five micro-batches on two ranks are no whole number of rounds.
    sizes = ["--micro-batches", "5", "--forward-ms", "1", "--backward-ms", "2"]
    main(["schedule", *TINY, *sizes, "--systems", INTERLEAVED, ONE_F_ONE_B, FLOOR])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(TITLES[INTERLEAVED])]
    assert "cannot: ValueError: Interleaved 1F1B requires the number of microbatches" in line


@pytest.mark.parametrize(
    ("system", "staleness", "slack"),
    [
        (ASYNC, "least", 0),
        (ASYNC_MONITORED, "least", 0),
        (ASYNC_2BW, "uniform", 0),
        (ASYNC_SLACK_1, "least", 1),
        (ASYNC_EXACT, "least", "exact"),
    ],
)
def test_the_strategies_have_the_staleness_of_their_names(system: str, staleness: str, slack: int | str) -> None:
    settings = _strategy(Job("sleep", 2, 4, (system,), lookahead=1), system).session.settings
    assert (settings.staleness, settings.slack) == (staleness, slack)
    assert (settings.micro_batches, settings.lookahead, settings.delay) == (4, 1, 1)


def test_every_repeat_begins_elsewhere() -> None:
    job = Job("sleep", 2, 2, ("a", "b", "c", "d"), repeats=2)
    assert [job.order(repeat) for repeat in range(2)] == [("a", "b", "c", "d"), ("c", "d", "a", "b")]


def test_the_facts_of_a_link_are_told() -> None:
    facts = {"link_latency_ms": 10.0, "link_mbit": 100.0, "link_ping_ms": 10.234, "link_message_ms": 10.9}
    assert facts_line(facts) == (
        "link: 10 ms asked, 10.23 ms measured one way, 100 Mbit/s; a small message over it takes 10.90 ms"
    )
    assert facts_line({}) == ""


def fake_run(system: str, stage: int, seconds: float, busy: float) -> RankRun:
    marks = [seconds * (t + 1) for t in range(5)]
    bodies = [Span(Kind.FORWARD, 0, mark - busy, mark) for mark in marks]
    return RankRun(system, stage, bodies, marks, [])


def test_medians_utilisation_and_gain_are_those_of_the_steady_state() -> None:
    job = Job("sleep", 2, 2, (ASYNC, ASYNC_MONITORED, ONE_F_ONE_B, FLOOR), repeats=3, mini_batches=3, warm_up=1)
    runs = {
        ASYNC: [[fake_run(ASYNC, 0, s, 0.5 * s), fake_run(ASYNC, 1, s, 0.9 * s)] for s in (1.0, 1.2, 5.0)],
        ASYNC_MONITORED: [[fake_run(ASYNC_MONITORED, 0, s, s)] for s in (1.01, 1.2, 5.5)],
        ONE_F_ONE_B: [[fake_run(ONE_F_ONE_B, 0, s, s / 2)] for s in (1.8, 2.4, 5.0)],
        FLOOR: [[fake_run(FLOOR, 0, s, s)] for s in (0.9, 1.2, 4.0)],
    }
    measured = Measured(runs, {})
    line = summarise(job, measured)[0]
    assert line.milliseconds.median == pytest.approx(1200)
    assert line.utilisation is not None
    assert line.utilisation.median == pytest.approx(0.9)
    assert line.gain is not None
    assert line.gain.median == pytest.approx(1.8)
    assert line.of_floor is not None
    assert (line.of_floor.median, line.of_floor.min, line.of_floor.max) == pytest.approx((0.9, 0.8, 1.0))
    costs = costs_of_extras(job, measured)
    assert {system: (c.median, c.min, c.max) for system, c in costs.items()} == {
        ASYNC_MONITORED: pytest.approx((0.01, 0.0, 0.1))
    }
    assert costs_of_extras(job, Measured({FLOOR: runs[FLOOR]}, {})) == {}
    assert "1200.0 [1000.0-5000.0]" in table([line])
    assert "0.90 [0.50-1.00]" in table([line], ideal_gain=2.0)
    without = summarise(job, Measured({ASYNC: runs[ASYNC], ONE_F_ONE_B: runs[ONE_F_ONE_B]}, {}))
    assert "of the floor" in table([line])
    assert "of the floor" not in table(without)


def test_what_extras_cost_is_told_with_its_spread() -> None:
    costs = {ASYNC_MONITORED: Spread(0.001, -0.002, 0.01), ASYNC_TRACED: Spread(0.0042, 0.0, 0.005)}
    assert costs_text(costs) == (
        "PipelineMonitor costs +0.1% [-0.2% to +1.0%] of the time\n"
        "PipelineTrace costs +0.4% [+0.0% to +0.5%] of the time\n"
    )
    assert costs_text({}) == ""
