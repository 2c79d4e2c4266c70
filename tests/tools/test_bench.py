"""Tiny runs of the benchmarks: what they print and write, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Span
from lightning_asyncpp.tools.bench.command import main
from lightning_asyncpp.tools.bench.job import ASYNC, ASYNC_CLIPPED, ASYNC_FRESH, ONE_F_ONE_B, TITLES, Job, RankRun
from lightning_asyncpp.tools.bench.launch import BenchmarkFailedError, Measured, measure
from lightning_asyncpp.tools.bench.report import clipping_cost, summarise, table

TINY = ["--stages", "2", "--mini-batches", "3", "--warm-up", "2", "--repeats", "1", "--timeout", "200"]
SYSTEMS = set(TITLES)


def check_systems(results: dict[str, Any], systems: set[str]) -> None:
    assert set(results["systems"]) == systems
    for line in results["systems"].values():
        assert 0 < line["utilisation"]["median"] <= 1
        assert 0 < line["milliseconds"]["min"] <= line["milliseconds"]["median"] <= line["milliseconds"]["max"]
    assert results["systems"][ONE_F_ONE_B]["gain"]["median"] == 1.0
    assert {"cpu_count", "torch", "lightning"} <= set(results["machine"])


def test_schedule_prints_a_table_and_writes_json_spans_and_a_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "svg")}
    outputs = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    sizes = ["--micro-batches", "2", "--forward-ms", "2", "--backward-ms", "4"]
    main(["schedule", *TINY, *sizes, "--clip", "--fresh-last-stage", *outputs])
    printed = capsys.readouterr().out
    assert all(title in printed for title in TITLES.values())
    results = json.loads(files["json"].read_text())
    check_systems(results, SYSTEMS)
    assert results["systems"]["floor"]["milliseconds"]["median"] >= 2 * 6
    spans = json.loads(files["trace"].read_text())["spans"]
    assert [len(spans["async"]), len(spans["sync"])] == [2, 2]
    assert {kind for lane in spans["async"] for kind, *_ in lane} == {"F", "B", "U"}
    ElementTree.parse(files["svg"])


def test_compute_calibrates_and_reports_the_ideal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ["--micro-batches", "2", "--target-ms", "2", "--rows", "16", "--width", "16"]
    main(["compute", *TINY, *sizes, "--json", str(file)])
    (results,) = json.loads(file.read_text())
    check_systems(results, SYSTEMS - {ASYNC_FRESH})
    assert results["ideal_gain"] == 1.5
    assert results["facts"]["blocks"] >= 1
    assert "clipping costs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown benchmark 'nothing'"),
        (["schedule", "--stages", "1"], "at least 2 stages"),
        (["schedule", "--stages", "4", "--micro-batches", "3"], "use micro_batches >= 4"),
        (["schedule", "--stages", "4", "--micro-batches", "4", "--lookahead", "3"], "lookahead=3 does not fit"),
        (["schedule", "--forward-ms", "-1"], "forward"),
        (["schedule", "--repeats", "0"], "repeats"),
        (["compute", "--micro-batches", "2", "1"], "use micro_batches >= 2"),
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


def test_a_failing_process_ends_the_benchmark_with_its_message() -> None:
    with pytest.raises(BenchmarkFailedError, match="KeyError: 'unheard of'"):
        measure(Job("sleep", 2, 2, ("unheard of",), repeats=1, mini_batches=1), timeout=100)


def fake_run(system: str, stage: int, seconds: float, busy: float) -> RankRun:
    marks = [seconds * (t + 1) for t in range(5)]
    bodies = [Span(Kind.FORWARD, 0, mark - busy, mark) for mark in marks]
    return RankRun(system, stage, bodies, marks, [])


def test_medians_utilisation_and_gain_are_those_of_the_steady_state() -> None:
    job = Job("sleep", 2, 2, (ASYNC, ASYNC_CLIPPED, ONE_F_ONE_B), repeats=3, mini_batches=3, warm_up=1)
    runs = {
        ASYNC: [[fake_run(ASYNC, 0, s, 0.5 * s), fake_run(ASYNC, 1, s, 0.9 * s)] for s in (1.0, 1.2, 5.0)],
        ASYNC_CLIPPED: [[fake_run(ASYNC_CLIPPED, 0, s, s)] for s in (1.01, 1.2, 5.5)],
        ONE_F_ONE_B: [[fake_run(ONE_F_ONE_B, 0, s, s / 2)] for s in (1.8, 2.4, 5.0)],
    }
    measured = Measured(runs, {})
    line = summarise(job, measured)[0]
    assert line.milliseconds.median == pytest.approx(1200)
    assert line.utilisation.median == pytest.approx(0.9)
    assert line.gain is not None
    assert line.gain.median == pytest.approx(1.8)
    assert clipping_cost(job, measured) == pytest.approx(0.01)
    assert "1200.0 [1000.0-5000.0]" in table([line])
