"""What is concluded from runs: chosen learning rates, gaps, shares and when there is none; answers worked by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.tools.ablation.grid import Group, Row
from lightning_asyncpp.tools.ablation.report.summary import Ablation, Spread, Verdict, band, difference, share_recovered
from tests.tools.ablation.examples import left, run, search, seeds

MUON = Group("Muon", None)
HALF = {2: 12.706 / math.sqrt(2), 3: 4.303 / math.sqrt(3)}
"""Half of a 95 % interval over so many seeds, in sample standard deviations."""


def the_result(runs):
    (result,) = Ablation.of(runs).results.values()
    return result


def results(sync, delayed, corrected):
    runs = [*seeds(sync, delay="0"), *seeds(delayed), *seeds(corrected, correction="EF")]
    ablation = Ablation.of(runs)
    return ablation.sync(MUON), ablation.delayed(MUON), ablation.delayed(MUON, "EF")


def test_the_lr_with_the_lowest_loss_on_the_search_seed_is_chosen_whatever_other_seeds_say():
    searched = search({0.001: 2.0, 0.01: 1.5, 0.1: 1.8}, seed=7)
    result = the_result([run(9.0, seed=1), run(1.0, seed=2), *searched, run(0.5, seed=3, lr=0.1)])
    assert result.lr == 0.01
    assert dict(result.search) == {0.001: 2.0, 0.01: 1.5, 0.1: 1.8}
    assert dict(result.loss.values) == {1: 9.0, 2: 1.0, 7: 1.5}


def test_of_equal_losses_the_lower_lr_is_chosen_and_a_diverged_one_never():
    assert the_result(search({0.1: 1.5, 0.01: 1.5, 0.001: 1.6})).lr == 0.01
    assert the_result(search({0.001: 1.7, 0.01: None, 0.1: None})).lr == 0.001


def test_a_single_lr_is_used_even_if_a_seed_diverged_at_it():
    result = the_result(seeds([None, 1.5, 1.7]))
    assert result.lr == 0.01
    assert (result.loss.mean, result.loss.diverged) == (1.6, 1)


def test_without_a_finished_run_in_the_search_there_is_no_lr():
    result = the_result(search({0.01: None, 0.1: None}))
    assert (result.lr, result.best, result.loss.mean, result.at_edge) == (None, None, None, False)


@pytest.mark.parametrize(
    ("losses", "at_edge"),
    [
        ({0.001: 1.5, 0.01: 1.6, 0.1: 1.7}, True),
        ({0.001: 1.7, 0.01: 1.6, 0.1: 1.5}, True),
        ({0.001: 1.7, 0.01: 1.5, 0.1: 1.6}, False),
        ({0.001: 1.7, 0.01: 1.5, 0.1: None}, False),  # what diverged was tried: not the edge
        ({0.01: 1.5}, False),
    ],
)
def test_the_edge_is_the_lowest_or_highest_of_several_lrs(losses, at_edge):
    assert the_result(search(losses)).at_edge is at_edge


def test_mean_and_its_interval():
    loss = the_result(seeds([1.0, 2.0, 4.0])).loss
    assert loss.mean == pytest.approx(7 / 3)
    assert loss.half_width == pytest.approx(HALF[3] * math.sqrt((16 + 1 + 25) / 9 / 2))
    assert the_result(seeds([1.0])).loss.half_width is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 15, 30])
def test_intervals_are_those_of_students_t(degrees):
    """Its density, integrated to the quantile: 95 % lie within."""
    spread = Spread({seed: (-1.0) ** seed for seed in range(degrees + 1)})
    deviation = statistics.stdev(spread.values.values())
    quantile = spread.half_width * math.sqrt(degrees + 1) / deviation
    factor = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    parts = 20000
    middles = ((part + 0.5) * quantile / parts for part in range(parts))
    within = math.fsum((1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in middles) * 2 * factor * quantile / parts
    assert within == pytest.approx(0.95, abs=2e-4)


def test_gaps_are_paired_by_seed_over_the_seeds_that_both_have():
    sync, delayed, _ = results([1.0, 2.0], [1.1, 2.3, 9.0], [1.0])
    gap = difference(delayed, sync)
    assert dict(gap.values) == pytest.approx({1: 0.1, 2: 0.3})
    assert gap.half_width == pytest.approx(HALF[2] * math.sqrt(0.02))  # of 0.1, 0.3; unpaired it would be above 6


def test_shares_are_computed_per_seed():
    share = share_recovered(*results([1.0, 2.0, 3.0], [1.2, 2.3, 3.25], [1.1, 2.06, 3.05]))
    assert share.verdict is Verdict.RECOVERED
    assert dict(share.spread.values) == pytest.approx({1: 0.5, 2: 0.8, 3: 0.8})
    assert share.spread.half_width == pytest.approx(HALF[3] * math.sqrt(0.03))


def test_a_gap_whose_interval_holds_zero_has_no_share():
    # Gaps 0.1 - x, 0.1, 0.1 + x have mean 0.1 and standard deviation x, and 2.484 x is half of their interval.
    within, above = (share_recovered(*results([1.0] * 3, [1.1 - x, 1.1, 1.1 + x], [1.0] * 3)) for x in (0.041, 0.040))
    assert (within.verdict, within.spread.mean) == (Verdict.WITHIN_NOISE, None)
    assert (above.verdict, above.spread.mean) == (Verdict.RECOVERED, pytest.approx(1.0))


def test_a_gap_that_changes_sign_is_noise_and_one_below_zero_is_none():
    mixed = share_recovered(*results([1.0] * 6, [0.99, *[1.1] * 5], [1.0] * 6))
    assert mixed.verdict is Verdict.WITHIN_NOISE
    below = share_recovered(*results([1.0, 1.0], [0.9, 0.91], [1.0, 1.0]))
    assert below.verdict is Verdict.NO_GAP


def test_one_seed_gives_a_share_without_a_spread():
    share = share_recovered(*results([1.0], [1.4], [1.1]))
    assert (share.spread.mean, share.spread.half_width) == (pytest.approx(0.75), None)


def test_diverged_seeds_are_counted_and_left_out_of_gaps_and_shares():
    sync, delayed, corrected = results([1.0, 1.0, 1.0], [1.2, None, 1.2], [1.1, 1.1, None])
    gap, share = difference(delayed, sync), share_recovered(sync, delayed, corrected)
    assert (set(gap.values), gap.diverged) == ({1, 3}, 1)
    assert (set(share.spread.values), share.spread.diverged) == ({1}, 2)
    nothing = share_recovered(*results([1.0], [None], [1.1]))
    assert (nothing.verdict, nothing.spread.diverged) == (Verdict.DIVERGED, 1)


def test_without_a_shared_seed_there_is_no_share():
    ablation = Ablation.of([run(1.0, 1, delay="0"), run(1.2, 2), run(1.1, 2, correction="EF")])
    share = share_recovered(*(ablation.results[row] for row in ablation.results))
    assert share.verdict is Verdict.NOT_SHARED


@given(
    st.lists(st.tuples(st.floats(0.5, 5), st.floats(0.55, 0.6)), min_size=2, max_size=5),
    st.floats(-1, 2),
)
def test_the_share_put_in_comes_out(pairs, fraction):
    sync = [base for base, _ in pairs]
    delayed = [base + gap for base, gap in pairs]
    corrected = [base + (1 - fraction) * gap for base, gap in pairs]
    share = share_recovered(*results(sync, delayed, corrected))
    assert share.spread.mean == pytest.approx(fraction, abs=1e-9)
    assert share.spread.half_width == pytest.approx(0, abs=1e-9)


def test_conclusions_do_not_depend_on_the_order_of_runs():
    runs = [*search({0.001: 1.4, 0.01: 1.2}, delay="0"), *seeds([1.3, 1.4]), *seeds([1.25, 1.3], correction="EF")]
    shuffled = runs.copy()
    random.Random(0).shuffle(shuffled)
    assert dict(Ablation.of(shuffled).results) == dict(Ablation.of(runs).results)


def test_a_gap_of_which_a_correction_moves_ten_times_as_much_has_no_share():
    most, more = (share_recovered(*results([1.0], [1.01], [1.01 - gain])) for gain in (0.099, 0.101))
    assert (most.verdict, most.spread.mean) == (Verdict.RECOVERED, pytest.approx(9.9))
    assert (more.verdict, more.spread.mean) == (Verdict.NO_GAP, None)
    worse = share_recovered(*results([1.0], [1.01], [1.2]))
    assert worse.verdict is Verdict.NO_GAP


def test_a_search_with_a_training_left_has_neither_an_edge_nor_an_end():
    runs = search({0.1: 1.5, 0.7: 1.6})
    (searching,) = Ablation.of(runs, [left(0.5, log="x")]).results.values()
    assert (searching.search_over, searching.at_edge) == (False, False)
    (seeds_left,) = Ablation.of(runs, [left(0.1, 2), left(0.1, 3, log="x")]).results.values()
    assert (seeds_left.search_over, seeds_left.at_edge) == (True, True)
    (waiting,) = Ablation.of(runs, [left(None)]).results.values()
    assert not waiting.search_over


def test_what_has_a_result_is_not_open():
    assert Ablation.of([run(1.5)], [left()]).open == []
    assert len(Ablation.of([run(1.5)], [left(seed=2), left(0.02), left(delay="2")]).open) == 3


def test_rows_that_only_wait_for_a_result_come_after_those_that_have_one():
    ablation = Ablation.of([run(1.5)], [left(0.02), left(delay="0", optimizer="Lion"), left(correction="EF")])
    assert [group.label for group in ablation.groups] == ["Muon", "Lion"]
    assert ablation.corrections == ["EF"]
    assert [(row.group.optimizer, row.delay, row.correction) for row in ablation.rows] == [
        ("Muon", "1", "none"),
        ("Lion", "0", "none"),
        ("Muon", "1", "EF"),
    ]


def test_a_delay_with_further_settings_is_that_of_one_update_only_where_it_is_the_only_one():
    settings = {"delay": "1 micro_batches=4"}
    alone = Ablation.of([run(1.0, delay="0"), run(1.2, **settings)])
    assert (alone.one_update, alone.no_delay) == (("1 micro_batches=4", None), ("0", None))
    assert alone.delayed(MUON).loss.mean == 1.2
    both = Ablation.of([run(1.0, delay="0"), run(1.1), run(1.2, **settings)])
    assert both.delayed(MUON).loss.mean == 1.1
    two = Ablation.of([run(1.0, delay="0"), run(1.1, delay="1 micro_batches=2"), run(1.2, **settings)])
    assert two.delayed(MUON) is None
    planned = Ablation.of([run(1.2, **settings)], [left()])
    assert planned.one_update == ("1", None)


@pytest.mark.parametrize(
    ("delays", "delay", "sync"),
    [
        (["0", "0 micro_batches=4"], "1 micro_batches=4", "0 micro_batches=4"),
        (["0", "0 micro_batches=4"], "2 micro_batches=4", "0 micro_batches=4"),
        (["0", "0 micro_batches=4"], "2", "0"),
        (["0", "0 micro_batches=4"], "2 micro_batches=8", "0"),
        (["0"], "1 micro_batches=4", "0"),
        (["0 micro_batches=4"], "1", "0 micro_batches=4"),
        (["0 micro_batches=4", "0 micro_batches=8"], "pipedream", None),
    ],
)
def test_a_row_is_compared_with_the_one_without_delay_of_the_same_further_settings(delays, delay, sync):
    ablation = Ablation.of([*(run(1.0, delay=text) for text in delays), run(1.2, delay=delay)])
    against = ablation.sync_row(run(1.2, delay=delay).row)
    assert (against.delay if against in ablation.results else None) == sync


def test_the_band_holds_mean_and_extremes_at_the_steps_that_all_curves_have():
    curves = [[(0, 5.0), (10, 2.0), (20, 1.0)], [(0, 6.0), (10, math.nan), (20, 2.0), (30, 1.0)]]
    assert band(curves) == [(0, 5.5, 5.0, 6.0), (20, 1.5, 1.0, 2.0)]
    assert band([]) == []


def test_what_the_least_staleness_takes_back_is_a_part_of_the_gap_of_one_update():
    least = {"delay": "least micro_batches=8", "stages": 4}
    runs = [*seeds([1.0] * 3, delay="0"), *seeds([1.4] * 3), *seeds([1.1] * 3, **least)]
    ablation = Ablation.of(runs)
    (row,) = (row for row in ablation.rows if row.kind == "least")
    assert ablation.uncorrected_row(row) == Row(MUON, "1", None, "none")
