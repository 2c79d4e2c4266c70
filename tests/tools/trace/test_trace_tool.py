"""Recordings are read, summarised and drawn as their known schedules require."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_asyncpp.cli import main as asyncpp
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.tools.recorded_run import TraceError, read_run
from lightning_asyncpp.tools.trace import picture
from lightning_asyncpp.tools.trace_summary import Summary, summarise, table
from tests.helpers.recorded import off_schedule
from tests.tools.trace.synthetic import Recording

SMALL = Recording(stages=2, microbatches=2, mini_batches=3)
SYNC = Recording(stages=4, microbatches=4, mini_batches=5, delay=0)
ASYNC = Recording(stages=4, microbatches=8, mini_batches=6, lookahead=1)
REPLICAS = Recording(stages=3, replicas=2, microbatches=4, mini_batches=3, lookahead=1)


def middle(recording: Recording, folder: Path) -> Summary:
    """Return a summary of the third and the fourth mini-batch, without filling and draining the pipeline."""
    run = recording.read(folder)
    begin, end = (
        next(s.start for s in run.ranks[0].of(Kind.FORWARD) if run.ranks[0].mini_batch(s) == t) for t in (2, 4)
    )
    moved = [[replace(s, start=s.start - begin, end=s.end - begin) for s in rank.spans] for rank in run.ranks]
    inside = [[span for span in spans if span.end > 0 and span.start < end - begin] for spans in moved]
    ranks = [replace(rank, spans=spans) for rank, spans in zip(run.ranks, inside)]
    return summarise(replace(run, ranks=ranks, seconds=end - begin))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    run = SMALL.read(tmp_path)
    assert [(rank.meta.schedule, rank.meta.rank) for rank in run.ranks] == list(zip(SMALL.schedules(), (1, 0)))
    for rank, lane in zip(run.ranks, SMALL.lanes()):
        key = lambda s: (s.kind.value, s.index, s.start)  # noqa: E731
        for read, span in zip(sorted(rank.spans, key=key), sorted(lane, key=key), strict=True):
            assert replace(read, start=0, end=0) == replace(span, start=0, end=0)
            assert (read.start, read.end) == pytest.approx((span.start, span.end), abs=2e-9)
        assert rank.places == {k: divmod(k, 2) for k in range(6)}
    assert run.seconds == pytest.approx(max(span.end for lane in SMALL.lanes() for span in lane))
    assert run.mini_batches == range(3)


def test_a_killed_run_is_read_to_its_last_line_and_missing_ranks_are_named(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    file = tmp_path / "rank-00000.json"
    file.write_text(file.read_text()[:-9])
    assert len(read_run(tmp_path).ranks[1].spans) == len(SMALL.lanes()[1]) - 1
    file.unlink()
    summary = summarise(read_run(tmp_path))
    assert any("ranks [0] are missing" in note for note in summary.notes)
    assert summary.ideal_step is None


def test_what_is_no_recording_is_named(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    file = tmp_path / "rank-00000.json"
    file.write_text(file.read_text().replace('"cat":"F"', '"cat":"X"', 1))
    with pytest.raises(TraceError, match=r"rank-00000.json:\d+ is not a line of a recording"):
        read_run(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        asyncpp(["trace", str(tmp_path / "nowhere")])


def test_a_flush_costs_the_known_bubble(tmp_path: Path) -> None:
    """The bubble is (P - 1) / (m + P - 1) of the time, spent waiting for neighbours and for agreement on updates."""
    summary = summarise(SYNC.read(tmp_path))
    for row in summary.rows:
        waits = sum(row.shares[cause] for cause in ("activation", "gradient", "agreement", "rest"))
        assert (row.utilisation, row.ideal, waits) == (pytest.approx(4 / 7), pytest.approx(4 / 7), pytest.approx(3 / 7))
        assert row.staleness == 0
    assert summary.ideal_step == pytest.approx(summary.step)


def test_without_a_flush_the_middle_of_a_run_is_full(tmp_path: Path) -> None:
    summary = middle(ASYNC, tmp_path)
    assert all(row.utilisation == pytest.approx(1, abs=1e-6) for row in summary.rows)
    assert all(row.ideal == pytest.approx(1) for row in summary.rows)
    assert summary.total.staleness == 1


def test_a_slow_stage_is_waited_for(tmp_path: Path) -> None:
    """Stages before the slow stage wait for gradients, the stage after it for activations."""
    summary = middle(replace(ASYNC, forward=[0.01, 0.01, 0.015, 0.01]), tmp_path)
    assert [row.shares["gradient"] for row in summary.rows] == pytest.approx([1 / 7, 1 / 7, 0, 0], abs=1e-6)
    assert [row.shares["activation"] for row in summary.rows] == pytest.approx([0, 0, 0, 1 / 7], abs=1e-6)
    assert [row.ideal for row in summary.rows] == pytest.approx([6 / 7, 6 / 7, 1, 6 / 7])
    assert summary.rows[2].forward_ms == pytest.approx(15, abs=1e-3)
    assert summary.layers == [3, 3, 3, 3]
    assert summary.balance == pytest.approx(35 / ((35 + 3 * 30) / 4), rel=1e-3)


@pytest.mark.parametrize(
    ("slack", "shares"), [(0, [3 / 8, 2 / 8, 1 / 8, 0]), (1, [4 / 8, 3 / 8, 2 / 8, 1 / 8]), ("exact", [3 / 8] * 4)]
)
def test_the_staleness_of_every_stage_is_measured(tmp_path: Path, slack: int, shares: list[float]) -> None:
    run = replace(ASYNC, lookahead=0, staleness="least", slack=slack).read(tmp_path)
    summary = summarise(run)
    assert ([row.staleness for row in summary.rows], off_schedule(run)) == (shares, [])
    assert all(f" {share:.2f}\n" in table(run, summary) for share in shares)


@pytest.mark.parametrize(
    ("hop", "microbatches", "said"),
    [
        (0.0, 8, ""),
        (0.003, 8, ""),  # a tenth of a microbatch; an update takes 1 + 2 * 0.1 * 3 / 4 times as long
        (0.015, 8, "lookahead=1 hides one between the two halves of the stages, lookahead=3 hides all"),
        (0.015, 5, "lookahead=1 hides one between the two halves of the stages, lookahead=2 hides all"),  # what fits
        (0.015, 4, "lookahead=1 hides them"),
    ],
)
def test_waits_and_the_lookahead_against_them_are_named(
    tmp_path: Path, hop: float, microbatches: int, said: str
) -> None:
    recording = replace(ASYNC, lookahead=0, microbatches=microbatches, mini_batches=30, hop=hop)
    run = recording.read(tmp_path / "0")
    why = "an update takes 1.8 times as long. If slow links are the reason, "
    assert " ".join(table(run, summarise(run)).split()).partition(why)[2].partition(", or a part")[0] == said
    if microbatches == 8:
        ahead = replace(recording, lookahead=3).read(tmp_path / "3")
        assert "Waits" not in table(ahead, summarise(ahead))


def test_the_command_prints_a_table_and_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    REPLICAS.write(tmp_path / "trace")
    files = {name: tmp_path / f"out.{name}" for name in ("html", "perfetto", "json")}
    asyncpp(["trace", str(tmp_path), *(x for name, file in files.items() for x in (f"--{name}", str(file)))])
    printed = capsys.readouterr().out
    assert "3 stages x 2 replicas, 4 microbatches per mini-batch, lookahead 1, no flush" in printed
    figures = json.loads(files["json"].read_text())
    assert [row["name"] for row in figures["rows"]][:4:3] == ["r0 stage 0", "r1 stage 0"]
    assert [row["bytes_sent"] for row in figures["rows"]] == [12_000, 24_000, 12_000] * 2
    for row in (*figures["rows"], figures["total"]):
        assert sum(row["shares"].values()) == pytest.approx(1)
    page = files["html"].read_text()
    assert page.count("<rect") == sum(len(rank.spans) for rank in read_run(tmp_path).ranks)
    assert not re.search(r"(src|href)=", page), "it asks nobody for anything"


def test_bars_are_where_the_spans_are(tmp_path: Path) -> None:
    run = REPLICAS.read(tmp_path)
    svg = ElementTree.fromstring(picture(run))
    found = {(bar.attrib["y"], bar.findtext("{*}title", "").partition(",")[0]): bar.attrib for bar in svg}
    for lane, rank in enumerate(run.ranks):
        for span in rank.of(Kind.BACKWARD):
            bar = found[str(30 * lane + 4), f"{rank.meta.name}: backward {span.index}"]
            assert float(bar["x"]) == pytest.approx(span.start * 1e6, abs=0.1)
            assert float(bar["width"]) == pytest.approx((span.end - span.start) * 1e6, abs=0.1)
