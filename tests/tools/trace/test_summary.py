"""Where the time of a stage went, against what is known of the schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core.recording.trace import Beside, Span, Wait
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.tools.trace.causes import CAUSES, WORK, Phases, find_episodes, seconds_by_cause, underway
from lightning_asyncpp.tools.trace.recorded_run import RankTrace, RecordedRun
from lightning_asyncpp.tools.trace.run_summary import Summary, _schedule, summarise
from lightning_asyncpp.tools.trace.run_table import table
from lightning_asyncpp.tools.trace.staleness import check_versions
from tests.tools.trace.synthetic import Recording

SYNC = Recording(stages=4, micro_batches=4, mini_batches=5, delay=0)
ASYNC = Recording(stages=4, micro_batches=8, mini_batches=6, lookahead=1)
NO_PHASES = Phases((), ())


def summary_of(recording: Recording, folder: Path) -> Summary:
    return summarise(recording.read(folder))


def test_a_flush_costs_the_known_bubble(tmp_path: Path) -> None:
    """(P - 1) / (m + P - 1) of the time, all of it filling and draining; no update is hidden."""
    summary = summary_of(SYNC, tmp_path)
    for row in summary.rows:
        assert row.utilisation == pytest.approx(4 / 7)
        assert row.shares["warm-up"] + row.shares["drain"] == pytest.approx(3 / 7)
        assert row.ideal == pytest.approx(4 / 7)
        assert row.staleness == "0"
    assert summary.rows[0].shares["warm-up"] == pytest.approx(0, abs=1e-6)
    assert summary.rows[3].shares["warm-up"] == pytest.approx(5 * 3 * 0.010 / summary.seconds)
    assert summary.total.hidden == pytest.approx(0, abs=1e-6)
    assert summary.ideal_seconds == pytest.approx(summary.seconds)


def test_without_a_flush_the_middle_of_a_run_is_full(tmp_path: Path) -> None:
    run = ASYNC.read(tmp_path)
    whole, middle = summarise(run), summarise(run.between(2, 3))
    assert all(row.utilisation == pytest.approx(1, abs=1e-6) for row in middle.rows)
    assert all(row.ideal == pytest.approx(1) for row in middle.rows)
    assert middle.mini_batches == (2, 3)
    assert middle.total.staleness == "1"
    assert whole.total.staleness == "0, 1"
    assert whole.rows[0].versions == (0, 4)
    assert whole.rows[1].shares["drain"] > 0
    assert whole.violated == 0


def test_a_slow_stage_is_waited_for(tmp_path: Path) -> None:
    """Stages before it wait for gradients, the one after for activations."""
    slow = replace(ASYNC, forward=[0.01, 0.01, 0.015, 0.01])
    middle = summarise(slow.read(tmp_path).between(2, 3))
    assert [row.shares["gradient"] for row in middle.rows] == pytest.approx([1 / 7, 1 / 7, 0, 0], abs=1e-6)
    assert [row.shares["activation"] for row in middle.rows] == pytest.approx([0, 0, 0, 1 / 7], abs=1e-6)
    assert middle.rows[2].utilisation == pytest.approx(1, abs=1e-6)
    assert [row.ideal for row in middle.rows] == pytest.approx([6 / 7, 6 / 7, 1, 6 / 7])
    assert middle.rows[2].forward_ms == pytest.approx(15, abs=1e-3)


def test_the_busiest_stage_is_named_with_its_share(tmp_path: Path) -> None:
    """Where it is also in a run that waits: 1.5 * 30 ms against three stages of 30."""
    slow = replace(ASYNC, replicas=2, forward=[0.01, 0.01, 0.02, 0.01], backward=[0.02, 0.02, 0.025, 0.02])
    run = slow.read(tmp_path)
    summary = summarise(run)
    assert summary.balance is not None
    assert (summary.balance.busiest, summary.balance.layers) == (2, ())
    assert summary.balance.imbalance == pytest.approx(45 / ((45 + 3 * 30) / 4))
    assert "Balance: the busiest stage, stage 2, computes 1.33 times the mean of the stages." in table(run, summary)
    cut = [replace(rank, meta=replace(rank.meta, layers=5 - rank.meta.stage)) for rank in run.ranks]
    assert "of the stages; layers per stage: 5, 4, 3, 2." in table(run, summarise(replace(run, ranks=cut)))
    assert summarise(replace(run, ranks=run.ranks[1:])).balance is None
    assert summary.as_json()["balance"]["busiest"] == 2


def test_one_stage_has_nothing_to_balance(tmp_path: Path) -> None:
    assert summary_of(Recording(stages=1), tmp_path).balance is None


def test_bytes_add_up(tmp_path: Path) -> None:
    summary = summary_of(replace(ASYNC, replicas=2), tmp_path)
    assert [row.bytes_sent for row in summary.rows] == [48_000, 96_000, 96_000, 48_000] * 2
    assert summary.total.bytes_sent == 2 * 288_000
    assert [row.name for row in summary.rows][:5:4] == ["r0 stage 0", "r1 stage 0"]


kinds = st.sampled_from([*Kind, *Wait, *Beside])
times = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.tuples(kinds, times, times), max_size=30), st.lists(st.tuples(times, times), max_size=3))
def test_shares_always_add_up(spans: list[tuple[Kind, float, float]], phases: list[tuple[float, float]]) -> None:
    """However spans lie in each other and over the edges."""
    made = [Span(kind, 0, min(a, b), max(a, b)) for kind, a, b in spans]
    intervals = [(min(a, b), max(a, b)) for a, b in phases]
    seconds = seconds_by_cause(made, Phases(intervals, intervals[:1]), 2.0, 7.0)
    assert set(seconds) == {*WORK, *CAUSES}
    assert sum(seconds.values()) == pytest.approx(5.0)
    assert all(value >= 0 for value in seconds.values())


def test_the_innermost_span_counts() -> None:
    spans = [
        Span(Beside.DRAIN, 0, 0, 10), Span(Kind.FORWARD, 0, 1, 5), Span(Beside.SEND, 0, 3, 4),
        Span(Wait.GRADIENT, 0, 5, 6), Span(Kind.UPDATE, 0, 8, 9),
    ]  # fmt: skip
    seconds = seconds_by_cause(spans, NO_PHASES, 0, 12)
    expected = {"warm-up": 1, "forward": 3, "send": 1, "gradient": 1, "update": 1, "framework": 2, "drain": 3}
    assert {cause: value for cause, value in seconds.items() if value} == expected


def test_data_validation_and_checkpoints_have_their_own_share() -> None:
    spans = [Span(Wait.DATA, 0, 0, 1), Span(Beside.EVALUATE, 0, 1, 3), Span(Beside.CHECKPOINT, 0, 3, 3.5)]
    seconds = seconds_by_cause(spans, NO_PHASES, 0, 4)
    assert (seconds["data"], seconds["evaluate"], seconds["checkpoint"]) == (1, 2, 0.5)


def test_an_agreement_that_waits_for_backwards_is_part_of_the_drain() -> None:
    spans = [Span(Wait.AGREEMENT, 0, 1, 4)]
    seconds = seconds_by_cause(spans, Phases((), [(0.5, 3.0)]), 1, 4)
    assert (seconds["drain"], seconds["agreement"]) == (2, 1)


def test_episodes_end_where_nothing_is_in_flight(tmp_path: Path) -> None:
    assert [(e.first, e.last) for e in find_episodes(SYNC.read(tmp_path / "sync").ranks)] == [
        (0, 3), (4, 7), (8, 11), (12, 15), (16, 19),
    ]  # fmt: skip
    run = ASYNC.read(tmp_path / "async")
    (whole,) = find_episodes(run.ranks)
    assert (whole.first, whole.last, whole.cut_before, whole.cut_after) == (0, 47, False, False)
    (part,) = find_episodes(run.between(2, 3).ranks)
    assert (part.cut_before, part.cut_after) == (True, True)


# -- the promised staleness ----------------------------------------------------------------------------------------


def changed(run: RecordedRun, change: object) -> RankTrace:
    """Stage 1 with other spans."""
    rank = run.ranks[1]
    return replace(rank, spans=[change(span) for span in rank.spans])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "index", "fields", "message"),
    [
        (
            Kind.FORWARD,
            17,
            {"version": 0},
            "forward 17 of mini-batch 2 ran on W0, not on W1: its gradient is 2",
        ),
        (Kind.FORWARD, 17, {"version": 2}, "its gradient is 0 updates old, not 1"),
        (Kind.BACKWARD, 20, {"version": 2}, "micro-batch 20: forward on W1, backward on W2"),
        (Kind.UPDATE, 1, {"version": 3}, "update 1 made W3, not W2"),
        (Kind.UPDATE, 0, {"end": 100.0}, "began before update 0 had ended, which makes its weights"),
        (Kind.UPDATE, 3, {"start": 0.0}, "update 3 began before backward 24 had ended, which belongs to it"),
    ],
)
def test_a_broken_promise_is_said(
    tmp_path: Path, kind: Kind, index: int, fields: dict[str, float], message: str
) -> None:
    run = ASYNC.read(tmp_path)
    assert check_versions(run.ranks[1]).violated == 0
    wrong = changed(run, lambda s: replace(s, **fields) if (s.kind, s.index) == (kind, index) else s)
    found = check_versions(wrong)
    assert found.violated >= 1
    assert any(message in problem for problem in found.violations)
    broken = replace(run, ranks=[run.ranks[0], wrong, *run.ranks[2:]])
    assert "STALENESS VIOLATED" in table(broken, summarise(broken))


LEAST = replace(ASYNC, lookahead=0, staleness="least", start=1)


@pytest.mark.parametrize(
    ("recording", "shares", "total", "sentence"),
    [
        (LEAST, [3 / 8, 2 / 8, 1 / 8, 0], "0.00-0.38", "3, 2, 1, 0"),
        (replace(LEAST, slack=1), [4 / 8, 3 / 8, 2 / 8, 1 / 8], "0.12-0.50", "4, 3, 2, 1"),
        (replace(LEAST, slack="exact", start=0), [3 / 8] * 4, "0.38", "3, 3, 3, 3"),
        (replace(LEAST, slack=9), [1] * 4, "0, 1", "8, 8, 8, 8"),
    ],
    ids=["least", "slack", "exact", "all"],
)
def test_the_share_of_micro_batches_on_older_weights_is_told(
    tmp_path: Path, recording: Recording, shares: list[float], total: str, sentence: str
) -> None:
    run = recording.read(tmp_path)
    summary = summarise(run)
    assert summary.violated == 0
    assert [row.stale_share for row in summary.rows] == shares
    assert summary.total.stale_share == pytest.approx(sum(shares) / 4)
    assert summary.total.staleness == total
    older = f"W_max(t-1, {recording.start})"
    promised = (
        f"{older} with the first {sentence} of its micro-batches on stages 0, 1, 2, 3, and with the others on W_t"
    )
    assert f"Staleness: as promised, mini-batch t ran on {promised}" in table(run, summary)
    assert all(row.ideal == pytest.approx(1) for row in summarise(run.between(2, 4)).rows)
    part = run.between(3, 4)
    assert [row.stale_share for row in summarise(part).rows] == pytest.approx(shares, abs=0.13), "in flight at its ends"
    assert summarise(part).violated == 0


@pytest.mark.parametrize(
    "recording",
    [
        replace(LEAST, slack="exact", start=0),
        replace(LEAST, slack=1, tied=(0, 3)),
        ASYNC,
        SYNC,
    ],
    ids=["exact", "tied", "uniform", "sync"],
)
def test_the_ideal_is_that_of_the_runs_own_schedule(recording: Recording) -> None:
    """Which stages step ahead of the others, and which wait for a shared gradient, is not known from what they hold."""
    plain = replace(recording, start=0)
    assert [_schedule(meta) for meta in recording.metas()] == plain.schedules()


@pytest.mark.parametrize(("k", "promised", "other"), [(17, 1, 2), (18, 2, 1)])
def test_a_version_that_is_off_by_a_micro_batch_is_said(tmp_path: Path, k: int, promised: int, other: int) -> None:
    """Stage 1 holds back the first two of mini-batch 2, 16 and 17."""
    wrong = changed(
        LEAST.read(tmp_path), lambda s: replace(s, version=other) if s.index == k and not s.num_bytes else s
    )
    assert f"forward {k} of mini-batch 2 ran on W{other}, not on W{promised}" in check_versions(wrong).violations[0]


def test_unrecorded_versions_are_not_taken_for_right_ones(tmp_path: Path) -> None:
    run = ASYNC.read(tmp_path)
    bare = [replace(rank, spans=[replace(s, version=-1) for s in rank.spans]) for rank in run.ranks]
    without = replace(run, ranks=bare)
    assert "weight versions were not recorded" in table(without, summarise(without))


# -- hidden updates ------------------------------------------------------------------------------------------------


def rank_with(spans: list[Span], stage: int = 0) -> RankTrace:
    meta = Recording(micro_batches=1).metas()[stage]
    return RankTrace(meta, (), spans)


def test_what_nobody_waits_for_is_hidden() -> None:
    """Complete at 1, possible at 4 because of the other stage; the stage asks at 2 and gets it at 4.5."""
    own = rank_with([Span(Kind.BACKWARD, 0, 0, 1), Span(Wait.AGREEMENT, 0, 2, 4.5)])
    other = rank_with([Span(Kind.BACKWARD, 0, 3, 4)], 1)
    found = underway(own, [own, other])
    assert found is not None
    assert (found.seconds, found.exposed) == (3.5, 2.5)
    late = rank_with([Span(Kind.BACKWARD, 0, 0, 1), Span(Wait.AGREEMENT, 0, 9, 9.5)])
    found = underway(late, [late, other])
    assert found is not None
    assert (found.seconds, found.exposed) == (3.5, 0.5)
    assert found.hidden == pytest.approx(6 / 7)


def test_reductions_count_as_under_way() -> None:
    rank = rank_with([Span(Kind.BACKWARD, 0, 0, 1), Span(Beside.REDUCE, 0, 1, 6), Span(Wait.AGREEMENT, 0, 8, 8)])
    found = underway(rank, [rank])
    assert found is not None
    assert (found.seconds, found.hidden) == (5, 1)


def test_without_agreements_nothing_is_said_about_updates() -> None:
    rank = rank_with([Span(Kind.BACKWARD, 0, 0, 1), Span(Kind.UPDATE, 0, 2, 3)])
    assert underway(rank, [rank]) is None
