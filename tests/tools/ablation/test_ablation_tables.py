"""The tables' text, on hand-made runs; also of ablations that are not finished."""

from __future__ import annotations

import pytest

from lightning_asyncpp.tools.ablation.summary import Ablation
from lightning_asyncpp.tools.ablation.tables import (
    TITLES,
    correction_table,
    delay_table,
    equal_table,
    main_table,
    page,
    search_table,
)
from tests.tools.ablation.examples import run, search, seeds, whole_grid


def cells(table):
    """The lines of a table, by their first cell; without header."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines[2:]}


def finished():
    return [
        *search({0.001: 1.9, 0.1: 2.2}, delay="0"),
        *seeds([1.500, 1.510, 1.490], delay="0"),
        *seeds([1.600, 1.630, 1.580]),
        *search({0.001: 1.7}),
        *search({0.1: None}, correction="EF"),
        *seeds([1.540, 1.546, 1.544], correction="EF"),
    ]


def test_the_main_table_in_full():
    header, rule, line, _, note = main_table(Ablation.of(finished())).splitlines()
    assert header == "| optimizer | sync | async | gap | async + EF | EF recovers |"
    assert rule == "| --- | --- | --- | --- | --- | --- |"
    assert line == (
        "| Muon | 1.500 ± 0.010 (0.01) | 1.603 ± 0.025 (0.01 †) | +0.103 ± 0.015 | 1.543 ± 0.003 (0.01 †) |"
        " 57 ± 15 % |"  # of 0.060 / 0.100, 0.084 / 0.120, 0.036 / 0.090
    )
    assert note.endswith("13 runs (1 diverged), seeds 1, 2, 3, 600 steps, median 40.0 s of training per run.")
    assert "† edge of the search" in note
    assert "‡" not in note


def test_what_is_not_run_yet_says_so():
    table = main_table(Ablation.of([run(1.6), run(2.1, optimizer="Lion", delay="0"), *seeds([2.0], correction="EF")]))
    assert cells(table)["Muon"] == ["not run yet", "1.600 (0.01 ‡)", "not run yet", "2.000 (0.01 ‡)", "not run yet"]
    assert cells(table)["Lion"] == ["2.100 (0.01 ‡)", *["not run yet"] * 4]
    assert "‡ a single learning rate" in table


def test_a_row_with_fewer_seeds_than_others_says_how_many():
    table = main_table(Ablation.of([*seeds([1.5, 1.5], delay="0"), run(1.6)]))
    assert cells(table)["Muon"] == ["1.500 ± 0.000 (0.01 ‡)", "1.600 (0.01 ‡), 1 seed", "+0.100"]


def test_diverged_seeds_are_named():
    runs = [*seeds([1.5, 1.5, 1.5], delay="0"), *seeds([None, 1.6, None]), *seeds([None] * 3, correction="EF")]
    assert cells(main_table(Ablation.of(runs)))["Muon"] == [
        "1.500 ± 0.000 (0.01 ‡)",
        "2 of 3 diverged, else 1.600 (0.01 ‡)",
        "+0.100, 2 of 3 diverged",
        "3 of 3 diverged (0.01 ‡)",
        "a run diverged",
    ]


def test_a_row_that_diverged_at_every_lr_says_so():
    runs = [run(1.5, delay="0"), *search({0.01: None, 0.1: None}), run(1.6, correction="EF")]
    line = cells(main_table(Ablation.of(runs)))["Muon"]
    assert line[1:3] == ["diverged at all 2 lrs", "a run diverged"]
    assert line[4] == "a run diverged"


def test_many_corrections_have_a_line_each_instead_of_columns():
    runs = [*seeds([1.5, 1.5], delay="0"), *seeds([1.7, 1.7])]
    for name, loss in (("EF", 1.6), ("EF-2", 1.55)):
        runs += seeds([loss, loss], correction=name)
    assert correction_table(Ablation.of(runs)) == ""
    runs += seeds([1.7, None], correction="look-ahead")
    assert main_table(Ablation.of(runs)).startswith("| optimizer | sync | async | gap |\n")
    table = correction_table(Ablation.of(runs)).splitlines()
    assert table[0] == "| optimizer | correction | loss | gap to sync | recovers |"
    assert table[2:6] == [
        "| Muon | none | 1.700 ± 0.000 (0.01 ‡) | +0.200 ± 0.000 |  |",
        "| Muon | EF | 1.600 ± 0.000 (0.01 ‡) | +0.100 ± 0.000 | 50 ± 0 % |",
        "| Muon | EF-2 | 1.550 ± 0.000 (0.01 ‡) | +0.050 ± 0.000 | 75 ± 0 % |",
        "| Muon | look-ahead | 1 of 2 diverged, else 1.700 (0.01 ‡) | +0.200, 1 of 2 diverged | 0 %, 1 diverged |",
    ]


def test_a_gap_within_noise_has_no_share():
    runs = [*seeds([1.5, 1.6], delay="0"), *seeds([1.51, 1.7]), *seeds([1.5, 1.6], correction="EF")]
    assert cells(main_table(Ablation.of(runs)))["Muon"][-1] == "gap within noise"


def test_momentum_is_a_column_where_it_is_swept():
    table = main_table(Ablation.of([run(1.5, delay="0", momentum=m, optimizer=f"Muon {m}") for m in (0.95, 0.0)]))
    assert table.startswith("| optimizer | momentum |")
    assert cells(table)["Muon 0.95"][0] == "0.95"
    assert cells(table)["Muon 0.0"][0] == "0"


def test_other_delays_stand_below_the_delay_of_one_update_with_their_gap_to_sync():
    runs = [
        run(1.5, delay="0"),
        run(1.6),
        run(1.8, delay="pipedream", stages=16),
        run(1.7, delay="pipedream", stages=4),
    ]
    runs += [run(1.65, delay="2"), run(1.55, delay="pipedream", stages=4, correction="EF")]
    runs += [run(1.575, delay="fresh_last_stage", stages=4), run(1.575, delay="2", correction="EF")]
    lines = [line for line in delay_table(Ablation.of(runs)).splitlines() if line.startswith("| Muon")]
    assert lines == [
        "| Muon | 1 |  | none | 1.600 (0.01 ‡) | +0.100 |  |",
        "| Muon | 2 |  | none | 1.650 (0.01 ‡) | +0.150 |  |",
        "| Muon | 2 |  | EF | 1.575 (0.01 ‡) | +0.075 | 50 % |",
        "| Muon | fresh_last_stage | 4 | none | 1.575 (0.01 ‡) | +0.075 | 25 % |",
        "| Muon | pipedream | 4 | none | 1.700 (0.01 ‡) | +0.200 |  |",
        "| Muon | pipedream | 4 | EF | 1.550 (0.01 ‡) | +0.050 | 75 % |",
        "| Muon | pipedream | 16 | none | 1.800 (0.01 ‡) | +0.300 |  |",
    ]


def test_other_delays_without_their_sync_row_have_no_gap_yet():
    table = delay_table(Ablation.of([run(1.7, delay="fresh_last_stage", stages=4)]))
    assert "| Muon | fresh_last_stage | 4 | none | 1.700 (0.01 ‡) | not run yet | not run yet |" in table


def test_at_the_same_learning_rate_all_three_are_those_of_the_corrected_run():
    runs = [*search({0.01: 1.5, 0.1: 1.4}, delay="0"), *search({0.01: 1.7, 0.1: 2.0}), run(1.6, correction="EF")]
    runs += [*search({0.1: 1.2, 0.2: 1.3}, delay="0", optimizer="AdamW"), *search({0.01: 1.7}, optimizer="AdamW")]
    runs += search({0.01: 1.6}, optimizer="AdamW", correction="EF")
    lines = equal_table(Ablation.of(runs)).splitlines()
    assert lines[0] == "| optimizer | correction | lr | sync | async | corrected | recovers |"
    assert lines[2:4] == ["| Muon | EF | 0.01 | 1.500 | 1.700 | 1.600 | 50 % |", ""]  # AdamW has no such sync run
    single = [run(1.5, delay="0"), run(1.6), run(1.55, correction="EF")]
    assert equal_table(Ablation.of(single)) == ""


def test_the_search_shows_every_lr_on_the_search_seed():
    runs = [*search({0.001: 1.7, 0.1: None}, delay="0"), *seeds([1.5, 1.2], delay="0"), *search({0.1: 1.9, 1.0: 2.0})]
    _, _, sync, delayed = search_table(Ablation.of(runs)).splitlines()
    assert sync == "| Muon | 0 |  | none | 1.700 | **1.500** | diverged |  |"
    assert delayed == "| Muon | 1 |  | none |  |  | **1.900** | 2.000 |"


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], []),
        (finished(), ["main", "equal", "search"]),
        ([run(1.7, delay="pipedream", stages=4)], ["delays", "search"]),
        (whole_grid(), ["main", "equal", "delays", "search"]),
    ],
)
def test_the_page_has_the_tables_that_have_rows(runs, expected):
    text = page(Ablation.of(runs), ["curves.svg"] if runs else [])
    assert [key for key in TITLES if f"\n## {TITLES[key]}\n" in text] == expected
    assert text.startswith("# Ablation: demo" if runs else "# Ablation: no runs yet")
    assert ("![curves](curves.svg)" in text) == bool(runs)


def test_a_bar_in_a_name_does_not_break_the_table():
    assert "| A\\|B |" in main_table(Ablation.of([run(1.5, optimizer="A|B", delay="0")]))
