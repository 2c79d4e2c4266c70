"""Recordings are read back as they were written; what cannot be read is named with its file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_asyncpp.core.recording.trace import Beside, Span, Wait
from lightning_asyncpp.core.recording.trace_file import file_name
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.tools.trace.recorded_run import TraceError, find_recording, read_rank, read_run
from lightning_asyncpp.tools.trace.run_summary import summarise
from lightning_asyncpp.tools.trace.run_table import statements
from tests.tools.trace.synthetic import Recording, write_rank

SMALL = Recording(stages=2, micro_batches=2, mini_batches=3)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    run = SMALL.read(tmp_path)
    assert [(rank.meta.stage, rank.meta.rank) for rank in run.ranks] == [(0, 1), (1, 0)]
    for rank, lane in zip(run.ranks, SMALL.lanes()):
        assert len(rank.spans) == len(lane)
        by_start = sorted(rank.spans, key=lambda s: (s.kind.value, s.index, s.start))
        for read, span in zip(by_start, sorted(lane, key=lambda s: (s.kind.value, s.index, s.start))):
            assert replace(read, start=0, end=0) == replace(span, start=0, end=0)
            assert (read.start, read.end) == pytest.approx((span.start, span.end), abs=2e-9)
    assert run.start == 0
    assert run.seconds == pytest.approx(max(span.end for lane in SMALL.lanes() for span in lane))
    assert run.mini_batches == range(3)


def test_clocks_of_other_hosts_are_set_right(tmp_path: Path) -> None:
    """The second rank's clock is 250 s ahead; its file says so."""
    first, second = SMALL.metas()
    lanes = SMALL.lanes()
    write_rank(tmp_path, first, lanes[0], 2)
    shifted = replace(second, origin=second.origin + 250.0, clock_offset=-250.0, clock_error=4e-5)
    write_rank(tmp_path, shifted, lanes[1], 2)
    run = read_run(tmp_path)
    assert run.ranks[1].spans[0].start == pytest.approx(lanes[1][0].start, abs=1e-6)
    assert "clocks of different hosts agree to 40 us" in run.notes


def test_mini_batches_of_any_length_are_known(tmp_path: Path) -> None:
    """Accumulation may change while a run goes on, and backwards of the batch before the recording may come."""
    meta = SMALL.metas()[0]
    spans = [Span(Kind.FORWARD, k, k, k + 0.5) for k in range(4, 12)]
    write_rank(tmp_path, meta, spans, 4)
    rank = read_rank(tmp_path / file_name(meta.rank))
    rank = replace(rank, starts=[replace(s, mini_batch=t, first=f) for s, t, f in zip(rank.starts, (7, 8), (4, 10))])
    assert [rank.mini_batch_of(k) for k in (3, 4, 9, 10, 11)] == [6, 7, 7, 8, 8]
    assert rank.mini_batch(Span(Wait.DATA, 3, 0, 1)) == 3


def test_a_mini_batch_that_began_anew_is_read_from_its_first_beginning(tmp_path: Path) -> None:
    """As after a gradient that was dropped: all of the time from there on is the mini-batch's."""
    run = replace(SMALL, mini_batches=4).read(tmp_path)
    numbers = (0, 1, 1, 2)
    ranks = [replace(r, starts=[replace(s, mini_batch=t) for s, t in zip(r.starts, numbers)]) for r in run.ranks]
    anew = replace(run, ranks=ranks)
    assert [ranks[0].mini_batch_of(k) for k in range(8)] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [ranks[0].place_of(k) for k in range(8)] == [0, 1] * 4
    part = anew.between(1, 1)
    assert (part.start, part.end) == (ranks[0].starts[1].time, ranks[0].starts[3].time)


def test_a_killed_run_is_read_to_its_last_line(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    file = tmp_path / file_name(0)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-3]) + lines[-3][:7])
    run = read_run(tmp_path)
    assert len(run.ranks[1].spans) == len(SMALL.lanes()[1]) - 2
    assert any("the recordings of ranks [0] were cut off: the run was killed" in note for note in run.notes)


def test_what_follows_the_end_of_a_cut_recording_is_left_out(tmp_path: Path) -> None:
    """The other ranks go on where one was cut off; its missing time is no bubble."""
    whole = Recording(stages=2, micro_batches=4, mini_batches=8).write(tmp_path)
    before = summarise(read_run(tmp_path))
    file = whole / file_name(0)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]))
    run = read_run(tmp_path)
    assert run.end == pytest.approx(max(span.end for span in run.ranks[1].spans))
    assert all(span.end <= run.end for rank in run.ranks for span in rank.spans)
    assert run.seconds < 0.7 * before.seconds
    after = summarise(run)
    assert after.total.utilisation == pytest.approx(before.total.utilisation, abs=0.1)
    assert after.total.shares["drain"] < 0.1


def test_missing_ranks_are_named_and_no_verdict_is_given_for_them(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    (tmp_path / file_name(1)).unlink()
    run = read_run(tmp_path)
    assert any("ranks [1] are missing" in note for note in run.notes)
    summary = summarise(run)
    assert summary.total.hidden is None
    said = " ".join(statements(run, summary))
    assert "on the ranks that were recorded" in said
    assert "what of them is hidden is not known, recordings of ranks are missing" in said


def test_a_file_is_not_taken_for_its_folder(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    with pytest.raises(TraceError, match="is the recording of one rank; name its folder"):
        find_recording(tmp_path / file_name(0))


def test_the_newest_recording_below_a_folder_is_found(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "version_0" / "trace")
    newest = SMALL.write(tmp_path / "version_1" / "trace")
    for file in newest.iterdir():
        file.touch()
    assert find_recording(tmp_path) == newest
    assert any(f"read from {newest}, the newest" in note for note in read_run(tmp_path).notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('["F",0,1,2,0', "is no JSON"),
        ('{"F":0}', "a list was expected"),
        ('["X",0,1,2,0,0]', "unknown kind 'X'"),
        ('[["F"],0,1,2,0,0]', "unknown kind"),
        ('["F",0,1,2,0]', "6 values were expected, not 5"),
        ('["F",0,1,2.5,0,0]', "whole numbers were expected"),
        ('["F",0,1,true,0,0]', "whole numbers were expected"),
        ('["F",0,5,2,0,0]', "it ends before it begins"),
        ('["batch",0,1]', "4 values were expected"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    SMALL.write(tmp_path)
    file = tmp_path / file_name(0)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    with pytest.raises(TraceError) as caught:
        read_run(tmp_path)
    assert f"{file}:5: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "no recording of a pipeline"),
        ({"version": 2}, "reads version 1"),
        ({"rank": "0"}, "rank must be int"),
        ({"origin": None}, "origin must be float"),
        ({"clock_offset": float("inf")}, "clock_offset must be float"),
        ({"stage": 9}, "out of range"),
        ({"held": 1.5}, "held must be int"),
        ({"staleness": "most"}, "staleness='most' is none of uniform, least"),
        ({"slack": -1}, "slack=-1"),
        ({"slack": "some"}, "slack='some'"),
        ({"slack": True}, "slack must be"),
        ({"shares_with": 2}, "out of range"),
    ],
)
def test_a_wrong_first_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    SMALL.write(tmp_path)
    file = tmp_path / file_name(0)
    head, *rest = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(head) | change), *rest]) + "\n")
    with pytest.raises(TraceError, match=message) as caught:
        read_run(tmp_path)
    assert f"{file}:1: " in str(caught.value)


@pytest.mark.parametrize(
    "lacking", [("staleness", "slack", "shares_with"), ("held", "staleness", "slack", "shares_with")]
)
def test_recordings_from_before_the_staleness_was_noted_are_read(tmp_path: Path, lacking: tuple[str, ...]) -> None:
    least = replace(SMALL, staleness="least", slack=1, start=1, micro_batches=4)
    recording, held = (SMALL, [None, None]) if "held" in lacking else (least, [2, 1])
    recording.write(tmp_path)
    for file in tmp_path.iterdir():
        head, *rest = file.read_text().splitlines()
        old = {name: value for name, value in json.loads(head).items() if name not in lacking}
        file.write_text("\n".join([json.dumps(old), *rest]) + "\n")
    read = read_run(tmp_path)
    assert [(rank.meta.held, rank.meta.staleness) for rank in read.ranks] == [(count, None) for count in held]
    summary = summarise(read)
    assert (summary.violated, summary.ideal_seconds) == (0, pytest.approx(summary.seconds))


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="holds no recording"):
        read_run(tmp_path)
    (tmp_path / file_name(0)).write_text("")
    with pytest.raises(TraceError, match=":1: the file is empty"):
        read_run(tmp_path)


def test_files_of_different_runs_are_refused(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    meta = replace(SMALL.metas()[0], rank=7, num_stages=8)
    write_rank(tmp_path, meta, SMALL.lanes()[0], 2)
    with pytest.raises(TraceError, match="of different runs"):
        read_run(tmp_path)


def test_a_recording_of_nothing_says_so(tmp_path: Path) -> None:
    for meta in SMALL.metas():
        write_rank(tmp_path, meta, [Span(Beside.EVALUATE, 0, 0.0, 1.0)], 2)
    with pytest.raises(TraceError, match="nothing was recorded"):
        read_run(tmp_path)


def test_a_part_is_cut_out_at_the_first_stages_mini_batches(tmp_path: Path) -> None:
    run = SMALL.read(tmp_path)
    part = run.between(1, 1)
    starts = {start.mini_batch: start.time for start in run.ranks[0].starts}
    assert (part.start, part.end) == (starts[1], starts[2])
    assert all(span.end > part.start and span.start < part.end for rank in part.ranks for span in rank.spans)
    assert run.between(None, None) is run
    assert run.between(2, None).end == run.end
    for first, last, message in (
        (5, None, "--from-mini-batch 5: the recording holds mini-batches 0 to 2"),
        (2, 1, "swap"),
    ):
        with pytest.raises(TraceError, match=message):
            run.between(first, last)
