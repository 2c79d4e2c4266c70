"""The files that ``asyncpp trace`` writes."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning_asyncpp.tools.trace.run_summary import summarise

from lightning_asyncpp.cli import main as asyncpp
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.tools.trace import trace as command
from lightning_asyncpp.tools.trace.pictures import UNIT, events, page, page_data, write_png
from lightning_asyncpp.tools.trace.recorded_run import RecordedRun, TraceError
from lightning_asyncpp.tools.trace.trace import main
from tests.tools.trace.synthetic import Recording, write_rank

RECORDING = Recording(stages=3, replicas=2, micro_batches=4, mini_batches=3, lookahead=1)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RECORDING.read(tmp_path / "trace")


def test_the_command_prints_a_table_and_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RECORDING.write(tmp_path / "trace")
    files = {name: tmp_path / f"out.{name}" for name in ("html", "png", "perfetto", "json")}
    asyncpp(["trace", str(tmp_path), *(x for name, file in files.items() for x in (f"--{name}", str(file)))])
    printed = capsys.readouterr().out
    assert "3 stages x 2 replicas, 4 micro-batches per mini-batch, lookahead 1, no flush" in printed
    assert "as promised, mini-batch t ran on W_max(t-1, 0)." in printed
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    figures = json.loads(files["json"].read_text())
    assert len(figures["rows"]) == 6
    for row in (*figures["rows"], figures["total"]):
        assert sum(row["shares"].values()) == pytest.approx(1)
    assert figures["rows"][0]["utilisation"] == pytest.approx(
        sum(figures["rows"][0]["shares"][n] for n in ("forward", "backward"))
    )
    assert json.loads(files["perfetto"].read_text())["displayTimeUnit"] == "ms"


def test_the_command_shows_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RECORDING.write(tmp_path)
    main([str(tmp_path), "--from-mini-batch", "1", "--to-mini-batch", "1"])
    assert "mini-batches 1 to 1:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["{run}", "--from-mini-batch", "9"], "--from-mini-batch 9: the recording holds mini-batches 0 to 2"),
        (["{run}", "--from-mini-batch", "-1"], "from-mini-batch"),
        (["{run}", "--html", "{run}/no/such/folder/x.html"], "there is no folder"),
        ([], "run"),
    ],
)
def test_mistakes_are_said_in_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    RECORDING.write(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([argument.format(run=tmp_path) for argument in arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_that_breaks_its_promise_ends_with_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says delay 1, and its micro-batches ran without one."""
    wrong = replace(RECORDING, replicas=1, delay=0)
    lanes = wrong.lanes()
    for meta in wrong.metas():
        write_rank(tmp_path, replace(meta, delay=1), lanes[meta.stage], 4)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 1
    assert "STALENESS VIOLATED" in capsys.readouterr().out


# -- Perfetto ------------------------------------------------------------------------------------------------------


def test_slices_of_a_thread_lie_beside_or_in_each_other(run: RecordedRun) -> None:
    threads: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events(run):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    assert len({process for process, _ in threads}) == 6
    for slices in threads.values():
        slices.sort(key=lambda s: (s[0], -s[1]))
        for (_, end), (start, inner_end) in pairwise(slices):
            assert start >= end or inner_end <= end


def test_arrows_join_neighbours_in_time(run: RecordedRun) -> None:
    """One for every activation and every gradient that crossed, each from inside its slice to the start of another."""
    found = list(events(run))
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert len(starts) == 2 * 2 * 2 * 12  # directions, gaps, replicas, micro-batches
    assert starts.keys() == ends.keys()
    slices = {(e["pid"], e["ts"]) for e in found if e["ph"] == "X" and e["tid"] == 1}
    for number, start in starts.items():
        assert abs(start["pid"] - ends[number]["pid"]) == 1
        assert start["ts"] <= ends[number]["ts"]
        assert (ends[number]["pid"], ends[number]["ts"]) in slices


def test_counters_and_details(run: RecordedRun) -> None:
    found = list(events(run))
    counted = [event["args"]["bytes"] for event in found if event["ph"] == "C" and event["pid"] == 2]
    assert counted == [1000 * n for n in range(1, 25)]
    forward = next(e for e in found if e["ph"] == "X" and e["cat"] == "F" and e["args"]["micro_batch"] == 9)
    assert forward["name"] == "forward 9"
    assert forward["args"] == {"mini_batch": 2, "micro_batch": 9, "weights": "W1", "staleness": 1}
    names = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert "r0 stage 0 (rank 2, host)" in names


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_span(run: RecordedRun) -> None:
    data = page_data(run, summarise(run))
    for lane, rank in zip(data["lanes"], run.ranks):
        time = 0
        for i, span in enumerate(rank.spans):
            time += lane["starts"][i]
            assert time * UNIT == pytest.approx(span.start * 1e3, abs=UNIT)
            assert lane["lengths"][i] * UNIT == pytest.approx((span.end - span.start) * 1e3, abs=2 * UNIT)
            assert (lane["indices"][i], lane["versions"][i]) == (span.index, span.version)
        assert lane["utilisation"] == pytest.approx(
            sum(s.end - s.start for s in rank.spans if s.kind in (Kind.FORWARD, Kind.BACKWARD)) / run.seconds
        )


def test_the_page_asks_nobody_for_anything_and_cannot_be_broken_out_of(run: RecordedRun) -> None:
    noted = replace(run, notes=["</script><script>alert(1)</script> {{style}}"])
    text = page(noted, summarise(noted))
    assert "http://" not in text
    assert "https://" not in text
    assert "alert(1)</script>" not in text
    assert text.count("</script>") == 2
    assert "{{style}}" in text  # what is put in is not taken for a mark


def test_files_that_cannot_be_written_are_named_before_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RECORDING.write(tmp_path / "trace")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    wrong = ["--json", str(tmp_path / "no" / "x.json"), "--perfetto", str(tmp_path), "--png", str(tmp_path / "x.png")]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--html", str(tmp_path / "x.html"), *wrong])
    printed = capsys.readouterr().err
    for problem in ("there is no folder", "is a folder; name a file", "--png needs `matplotlib`"):
        assert problem in printed
    assert not (tmp_path / "x.html").exists()


def test_without_matplotlib_a_picture_is_refused(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TraceError, match=r'pip install "lightning-asyncpp\[plots\]"'):
        write_png(run, summarise(run), Path("never.png"))
