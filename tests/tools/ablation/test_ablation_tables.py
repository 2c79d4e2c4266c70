"""The tables' text, on hand-made runs; also of ablations that are not finished."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.report.tables import (
    TITLES,
    correction_table,
    delay_table,
    equal_table,
    main_table,
    page,
    search_table,
)
from tests.tools.ablation.examples import left, run, search, seeds, whole_grid


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
        "| Muon | 1.500 ± 0.025 (0.01) | 1.603 ± 0.063 (0.01 †) | +0.103 ± 0.038 | 1.543 ± 0.008 (0.01 †) |"
        " 57 ± 38 % |"  # of 0.060 / 0.100, 0.084 / 0.120, 0.036 / 0.090
    )
    assert note.endswith("13 runs (1 diverged), seeds 1, 2, 3, 600 steps, median 40.0 s of training per run.")
    assert "† edge of the search" in note
    assert "‡" not in note


def test_what_the_recipe_asks_for_and_is_not_run_yet_says_so():
    runs = [run(1.6), run(2.1, optimizer="Lion", delay="0"), *seeds([2.0], correction="EF")]
    waiting = [left(delay="0"), left(optimizer="Lion"), left(None, optimizer="Lion", correction="EF")]
    table = main_table(Ablation.of(runs, waiting))
    assert cells(table)["Muon"] == ["not run yet", "1.600 (0.01 ‡)", "not run yet", "2.000 (0.01 ‡)", "not run yet"]
    assert cells(table)["Lion"] == ["2.100 (0.01 ‡)", *["not run yet"] * 4]
    assert "‡ a single learning rate" in table
    failed = main_table(Ablation.of(runs, [left(delay="0", log="x"), left(0.02, delay="0")]))
    assert cells(failed)["Muon"] == ["failed", "1.600 (0.01 ‡)", "failed", "2.000 (0.01 ‡)", "failed"]
    assert cells(failed)["Lion"] == ["2.100 (0.01 ‡)", "", "", "", ""]


def test_columns_that_the_recipe_does_not_ask_for_are_left_out():
    without_one = [run(1.5, delay="0"), run(1.6, delay="2"), run(1.7, delay="10")]
    assert main_table(Ablation.of(without_one)).startswith("| optimizer | sync |\n")
    without_zero = main_table(Ablation.of([run(1.6), run(1.5, correction="EF")]))
    assert without_zero.startswith("| optimizer | async | async + EF |\n")
    wanted = main_table(Ablation.of([run(1.5, delay="0")], [left()]))
    assert cells(wanted)["Muon"] == ["1.500 (0.01 ‡)", "not run yet", "not run yet"]
    assert "0.01 ‡" in main_table(Ablation.of([run(1.5, delay="0", momentum=None), run(1.5, delay="0", momentum=0.9)]))


def test_a_row_whose_search_is_not_over_is_marked_and_neither_called_an_edge_nor_unsearched():
    runs = [*search({0.1: 1.5, 0.7: 1.6}, delay="0"), run(1.8, lr=0.1)]
    failed = [left(0.5, delay="0", log="a"), *(left(lr, log="b") for lr in (0.5, 0.7))]
    table = main_table(Ablation.of(runs, failed))
    assert cells(table)["Muon"] == ["1.500 (0.1 §)", "1.800 (0.1 §)", "+0.300 §"]
    assert "§ not finished: trainings of this row" in table
    assert "†" not in table
    assert "‡" not in table
    diverged = main_table(Ablation.of(search({0.1: None, 0.7: None}), [left(0.5)]))
    assert cells(diverged)["Muon"] == ["diverged at all 2 lrs §"]
    assert "§ not finished" in diverged


def test_a_row_with_seeds_left_keeps_the_signs_of_its_search():
    runs = [*search({0.1: 1.5, 0.7: 1.6}, delay="0"), *seeds([1.8, 1.9], lr=0.1)]
    table = main_table(Ablation.of(runs, [left(0.1, 2, delay="0")]))
    assert cells(table)["Muon"] == ["1.500 (0.1 † §), 1 seed", "1.850 ± 0.635 (0.1 ‡)", "+0.300, 1 seed §"]
    assert "† edge" in table


def test_a_share_of_what_is_not_finished_is_marked():
    runs = [*seeds([1.5, 1.5], delay="0"), run(1.9), *seeds([1.7, 1.7], correction="EF")]
    table = main_table(Ablation.of(runs, [left(seed=2)]))
    assert cells(table)["Muon"][1:] == [
        "1.900 (0.01 ‡ §), 1 seed",
        "+0.400 §",
        "1.700 ± 0.000 (0.01 ‡)",
        "50 %, 1 seed §",
    ]
    equal = equal_table(Ablation.of([*runs, *search({0.02: 1.6}, delay="0")], [left(seed=2)]))
    assert cells(equal)["Muon"][-1] == "50 % §"
    assert "§ not finished" in equal


def test_the_page_begins_with_what_is_missing():
    missing = [left(0.5, 1, log="logs/a.txt"), left(0.7), left(0.5, 1, delay="0", correction="none", momentum=0.9)]
    missing += [left(None, correction="EF"), left(0.1, 2, delay="pipedream", stages=4), left(0.1, 3, log="b")]
    text = page(Ablation.of([run(1.5)], missing), [])
    assert text.split("\n## ")[0] == (
        "# Ablation: demo\n\n"
        "Not all trainings of the recipe have a result; what depends on one that is missing is marked §."
        " The further seeds of a row count once its search is over.\n\n"
        "- Muon, delay 1: 2 failed, 1 still to be run\n"
        "- Muon, momentum 0.9, delay 0: 1 still to be run\n"
        "- Muon, delay 1, EF: the learning rate of another row is awaited\n"
        "- Muon, delay pipedream, 4 stages: 1 still to be run\n\n"
        "What failed, and its log:\n\n"
        "- Muon, delay 1, lr 0.5, seed 1: `logs/a.txt`\n"
        "- Muon, delay 1, lr 0.1, seed 3: `b`\n"
    )


def test_a_long_list_of_what_is_missing_is_cut_short():
    missing = [left(0.1, seed, optimizer=f"A{n}") for n in range(30) for seed in (1, 2)] + [left(log="x")]
    text = page(Ablation.of([], missing), []).split("\n## ")[0]
    assert text.startswith("# Ablation: no runs yet\n\nNot all")
    assert text.index("- Muon, delay 1: 1 failed") < text.index("- A0, delay 1: 2 still to be run")
    assert "- 11 more rows: 22 still to be run\n\nWhat failed" in text
    assert "more" not in text.split("What failed")[1]
    assert "- 5 more" in page(Ablation.of([], [left(seed=seed, log="x") for seed in range(25)]), [])


def test_a_row_with_fewer_seeds_than_others_says_how_many():
    table = main_table(Ablation.of([*seeds([1.5, 1.5], delay="0"), run(1.6)]))
    assert cells(table)["Muon"] == ["1.500 ± 0.000 (0.01 ‡)", "1.600 (0.01 ‡), 1 seed", "+0.100"]


def test_a_gap_and_a_share_from_fewer_seeds_than_the_loss_beside_them_say_how_many():
    runs = [*seeds([1.5, 1.5], delay="0"), *seeds([1.6, 1.61, 1.8]), *seeds([1.55] * 3, correction="EF")]
    table = main_table(Ablation.of(runs))
    assert cells(table)["Muon"][2] == "+0.105 ± 0.064, 2 seeds"
    assert cells(table)["Muon"][4] == "52 ± 29 %, 2 seeds"  # of 0.050 / 0.100, 0.060 / 0.110


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
        "| Muon | look-ahead | 1 of 2 diverged, else 1.700 (0.01 ‡) | +0.200, 1 of 2 diverged | 0 %, 1 of 2 diverged |",
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


def test_a_synchronous_start_takes_back_of_the_gap_without_it():
    runs = [run(1.5, delay="0"), run(1.6), run(1.55, delay="1 synchronous_start=60")]
    runs += [run(1.525, delay="1 synchronous_start=60", correction="EF"), run(1.7, delay="2 synchronous_start=5")]
    table = delay_table(Ablation.of(runs))
    assert [line for line in table.splitlines() if "synchronous_start=" in line] == [
        "| Muon | 1 synchronous_start=60 |  | none | 1.550 (0.01 ‡) | +0.050 | 50 % |",
        "| Muon | 1 synchronous_start=60 |  | EF | 1.525 (0.01 ‡) | +0.025 | 75 % |",
        "| Muon | 2 synchronous_start=5 |  | none | 1.700 (0.01 ‡) | +0.200 |  |",
    ]
    assert "Of a synchronous start: what it takes back" in table


def test_other_delays_without_their_sync_row_have_no_gap():
    runs = [run(1.7, delay="fresh_last_stage", stages=4)]
    assert "| Muon | fresh_last_stage | 4 | none | 1.700 (0.01 ‡) |  |  |" in delay_table(Ablation.of(runs))
    waiting = delay_table(Ablation.of(runs, [left(delay="0"), left()]))
    assert "| Muon | fresh_last_stage | 4 | none | 1.700 (0.01 ‡) | not run yet | not run yet |" in waiting


def test_delays_are_sorted_as_numbers_and_before_names():
    names = ["fresh_last_stage", "10", "2 micro_batches=16", "2", "2 micro_batches=4", "1"]
    table = delay_table(Ablation.of([run(1.5, delay="0"), *(run(1.6, delay=name) for name in names)]))
    shown = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| Muon")]
    assert shown == ["1", "2", "2 micro_batches=4", "2 micro_batches=16", "10", "fresh_last_stage"]


def test_the_only_delay_of_one_update_is_named_with_its_further_settings():
    runs = [run(1.5, delay="0"), run(1.7, delay="1 micro_batches=4"), run(1.2, delay="2")]
    runs += [run(1.6, delay="1 micro_batches=4", correction="EF")]
    table = main_table(Ablation.of(runs))
    header = "| optimizer | sync | async (micro_batches=4) | gap | async (micro_batches=4) + EF | EF recovers |"
    assert table.splitlines()[0] == header
    assert cells(table)["Muon"][2] == "+0.200"
    paired = main_table(Ablation.of([*runs, run(1.4, delay="0 micro_batches=4")]))
    assert paired.splitlines()[0] == header.replace("sync", "sync (micro_batches=4)", 1)
    assert cells(paired)["Muon"][2] == "+0.300"
    only = main_table(Ablation.of([run(1.5, delay="0", stages=2), run(1.7)]))
    assert only.startswith("| optimizer | sync (stages=2) | async | gap |\n")


def test_of_several_settings_the_plain_one_is_in_the_main_table_and_all_are_among_the_other_delays():
    settings = [run(1.7, delay="1 micro_batches=2"), run(1.8, delay="1 micro_batches=4")]
    runs = [run(1.5, delay="0"), run(1.6, delay="0 micro_batches=4"), *settings]
    assert main_table(Ablation.of(runs)).startswith("| optimizer | sync |\n")
    table = delay_table(Ablation.of(runs))
    assert [line for line in table.splitlines() if line.startswith("| Muon")] == [
        "| Muon | 0 micro_batches=4 |  | none | 1.600 (0.01 ‡) | +0.100 |  |",
        "| Muon | 1 micro_batches=2 |  | none | 1.700 (0.01 ‡) | +0.200 |  |",
        "| Muon | 1 micro_batches=4 |  | none | 1.800 (0.01 ‡) | +0.200 |  |",
    ]
    assert "The sync run is the one of the same further settings" in table
    with_plain = Ablation.of([*runs, run(1.9)])
    assert cells(main_table(with_plain))["Muon"][1:] == ["1.900 (0.01 ‡)", "+0.400"]
    assert delay_table(with_plain).count("| Muon | 1") == 3


def test_a_delay_is_compared_with_the_plain_sync_run_without_a_word_where_there_is_no_other():
    table = delay_table(Ablation.of([run(1.5, delay="0"), run(1.7, delay="2 micro_batches=4")]))
    assert "+0.200" in table
    assert "further settings" not in table


def test_at_the_same_learning_rate_all_three_are_run_at_it():
    runs = [*search({0.01: 1.5, 0.1: 1.4}, delay="0"), *search({0.01: 1.7, 0.1: 2.0}), run(1.6, correction="EF")]
    runs += [*search({0.1: 1.2, 0.2: 1.3}, delay="0", optimizer="AdamW"), *search({0.01: 1.7}, optimizer="AdamW")]
    runs += search({0.01: 1.6}, optimizer="AdamW", correction="EF")
    lines = equal_table(Ablation.of(runs)).splitlines()
    assert lines[0] == "| optimizer | correction | lr | sync | async | corrected | recovers |"
    assert lines[2:] == ["| Muon | EF | 0.01 | 1.500 | **1.700** | 1.600 | 50 % |"]  # AdamW has no such sync run
    single = [run(1.5, delay="0"), run(1.6), run(1.55, correction="EF")]
    assert equal_table(Ablation.of(single)) == ""


def test_at_the_same_learning_rate_a_training_of_two_corrections_stands_once_and_the_best_ones_are_bold():
    runs = [*search({0.01: 1.5, 0.02: 1.4, 0.04: None}, delay="0"), *search({0.01: 1.7, 0.02: 2.0, 0.04: 2.1})]
    same = run(1.6, correction="EF")
    searched = [replace(same, correction="EF-searched"), run(1.7, lr=0.02, correction="EF-searched")]
    table = equal_table(Ablation.of([*runs, same, *searched, run(1.9, lr=0.04, correction="EF-searched")]))
    assert table.splitlines()[2:] == [
        "| Muon | EF-searched | 0.01 | 1.500 | **1.700** | **1.600** | 50 % |",
        "| Muon | EF-searched | 0.02 | **1.400** | 2.000 | 1.700 | 50 % |",
    ]


def test_at_the_same_learning_rate_there_is_no_share_of_a_gap_that_is_none_over_the_seeds():
    sync, delayed = search({0.01: 1.5, 0.1: 1.6}, delay="0"), search({0.01: 1.55, 0.1: 1.7})
    corrected = [run(1.52, correction="EF")]
    alone = [*sync, *delayed, *corrected]
    assert cells(equal_table(Ablation.of(alone)))["Muon"][-1] == "60 %"
    noisy = [*seeds([1.5, 1.6], delay="0")[1:], *seeds([1.55, 1.6])[1:], *alone]
    assert cells(equal_table(Ablation.of(noisy)))["Muon"][-1] == "gap within noise"
    nearly_none = [*search({0.01: 1.5, 0.02: 1.49}, delay="0"), *search({0.01: 1.50002, 0.02: 1.6})]
    nearly_none += search({0.01: 1.4}, correction="EF")
    assert cells(equal_table(Ablation.of(nearly_none)))["Muon"][-1] == "no gap"


def test_small_losses_and_gaps_have_more_decimals():
    small = main_table(Ablation.of([run(0.00031, delay="0"), run(0.00044)]))
    assert cells(small)["Muon"] == ["0.00031 (0.01 ‡)", "0.00044 (0.01 ‡)", "+0.00013"]
    near = Ablation.of([*search({0.01: 1.5, 0.1: 1.6}, delay="0"), run(1.5004), run(1.5002, correction="EF")])
    assert cells(main_table(near))["Muon"][1:3] == ["1.50040 (0.01 ‡)", "+0.00040"]
    assert cells(equal_table(near))["Muon"][2:5] == ["**1.50000**", "1.50040", "1.50020"]
    assert "**1.50000**" in search_table(near)


@pytest.mark.parametrize(
    ("runs", "shown"),
    [
        ([*seeds([1.5, 1.6], delay="0"), *seeds([1.5002, 1.6])], "1.550"),  # a gap within noise
        ([run(1.5, delay="0"), run(1.5 + 1e-9)], "1.500"),  # the same in single precision
        ([run(0.0, delay="0"), run(1.0)], "0.000"),
        ([run(1.0, delay="0"), run(1.0099999999)], "1.000"),
        ([run(-0.04, delay="0"), run(-0.02)], "-0.040"),
        ([run(1e-12, delay="0"), run(1.0)], "0.00000000"),
    ],
)
def test_what_says_nothing_needs_no_decimals_and_eight_are_the_most(runs, shown):
    assert cells(main_table(Ablation.of(runs)))["Muon"][0].split(" ")[0] == shown


def test_the_search_shows_what_failed_or_is_still_to_be_run_and_has_no_choice_before_it_is_over():
    runs = [*search({0.001: 1.7, 0.1: 1.5}, delay="0"), run(1.9, lr=0.1)]
    missing = [left(0.01, delay="0", log="x"), left(1.0, delay="0"), left(0.1, 2), left(None, correction="EF")]
    lines = search_table(Ablation.of(runs, missing)).splitlines()
    assert lines[0] == "| optimizer | delay | stages | correction | lr 0.001 | lr 0.01 | lr 0.1 | lr 1 |"
    assert lines[2:] == [
        "| Muon | 0 |  | none | 1.700 | failed | 1.500 | not run yet |",
        "| Muon | 1 |  | none |  |  | **1.900** |  |",
    ]


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


def test_variants_have_a_column_and_are_compared_each_within_itself():
    runs = [
        *(run(1.5, delay="0", variant=v) for v in ("1200-updates", "600-updates")),
        run(1.6, variant="600-updates"),
        run(1.8, variant="1200-updates"),
    ]
    table = main_table(Ablation.of(runs))
    assert table.splitlines()[0] == "| optimizer | variant | sync | async | gap |"
    lines = [line.split(" | ") for line in table.splitlines()[2:4]]
    assert [(line[1], line[-1]) for line in lines] == [("600-updates", "+0.100 |"), ("1200-updates", "+0.300 |")]
