"""What a delay costs by the length of the training: answers worked by hand."""

from __future__ import annotations

import math

import pytest

from lightning_asyncpp.tools.ablation.grid import Row
from lightning_asyncpp.tools.ablation.report.lengths import further_updates, length_of, updates_to
from lightning_asyncpp.tools.ablation.report.plots import write_plots
from lightning_asyncpp.tools.ablation.report.summary import Ablation, Group
from lightning_asyncpp.tools.ablation.report.tables import delay_table
from tests.tools.ablation.examples import run, seeds

LEAST = {"delay": "least micro_batches=8", "stages": 4, "correction": "EF"}


def grid():
    """Without delay 2.0, 1.5 and 1.3 after 100, 200 and 400 updates, 0.1 less on the second seed."""
    without = [
        seeds([loss, loss - 0.1], delay="0", variant=f"{updates}-updates")
        for updates, loss in ((100, 2.0), (200, 1.5), (400, 1.3))
    ]
    late = [
        seeds([2.25, 2.15], correction="EF", variant="100-updates"),  # half of a halving before the shortest
        seeds([1.75, 1.65], variant="200-updates", **LEAST),  # half of a halving before its own length
        seeds([1.3, 1.3], variant="400-updates", **LEAST),  # as without delay, and half of a halving before it
    ]
    return Ablation.of([one for ones in (*without, *late) for one in ones])


def row_at(ablation, updates):
    (row,) = (row for row in ablation.rows if length_of(row.group) == updates and row.setting != ablation.no_delay)
    return row


@pytest.mark.parametrize(
    ("updates", "shares"),
    [(100, [math.sqrt(2)] * 2), (200, [math.sqrt(2)] * 2), (400, [1.0, math.sqrt(2)])],
)
def test_further_updates_to_the_same_loss(updates, shares):
    ablation = grid()
    further = further_updates(ablation, row_at(ablation, updates))
    assert [1 + value for value in further.values.values()] == pytest.approx(shares)


def test_a_loss_below_the_longest_training_is_beyond_it():
    assert updates_to([(100, 2.0), (200, 1.5)], 1.0) == pytest.approx(400)
    assert updates_to([(100, 2.0), (200, 1.5)], 2.5) == pytest.approx(50)


def test_where_no_length_can_be_told_there_is_none():
    assert updates_to([(100, 2.0)], 1.9) is None
    assert updates_to([(100, 2.0), (200, 2.1)], 2.05) is None
    runs = [run(1.0, delay="0", variant="wide"), run(1.2, variant="wide")]
    ablation = Ablation.of(runs)
    assert further_updates(ablation, Row(Group("Muon", None, "wide"), "1", None, "none")) is None
    assert "further updates" not in delay_table(Ablation.of([*runs, run(1.1, variant="wide", delay="2")]))


def test_the_table_has_a_column_of_them_and_a_plot_goes_with_it(tmp_path):
    ablation = grid()
    header, _, *lines = delay_table(ablation).splitlines()[:4]
    assert header.endswith("| recovers | further updates |")
    assert [line.split(" | ")[-1] for line in lines] == ["+41 ± 0 % |", "+21 ± 263 % |"]
    assert "length.svg" in write_plots(tmp_path, ablation, {})
