"""Results of trainings as files, and the order of the tables made of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lightning_asyncpp.tools.ablation.grid import CellKey, Group, Row
from lightning_asyncpp.tools.ablation.results import (
    CellResult,
    read_result,
    read_results,
    thinned,
    write_result,
    write_tables,
)

RESULT = CellResult("finished", 1.5, 10, 2.0, curve=[(5, 2.0), (10, 1.5)], train_curve=[(10, 3.0)])
# As written before device and threads were kept.
OLD = {
    "status": "finished", "loss": 1.5, "steps": 10, "seconds": 2.0, "metric": "val_loss",
    "curve": [[5, 2.0], [10, 1.5]], "train_curve": [[10, 3.0]], "samples": 320, "reason": "",
    "versions": {"torch": "2.11.0"},
}  # fmt: skip


def test_results_are_read_as_written_and_anything_else_is_none(tmp_path: Path) -> None:
    write_result(tmp_path, RESULT)
    assert read_result(tmp_path) == RESULT
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    for wrong in (
        {"status": "finished", "loss": None}, {"status": "odd"}, {"status": "finished", "loss": 1}, [], None, {},
        OLD | {"curve": 3}, OLD | {"versions": None},
    ):  # fmt: skip
        (tmp_path / "result.json").write_text(json.dumps(wrong))
        assert read_result(tmp_path) is None
    assert read_result(tmp_path / "none") is None


def test_results_of_other_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(OLD | {"energy": 3}))
    result = read_result(tmp_path)
    assert result is not None
    assert result.versions == {"torch": "2.11.0"}
    result.versions = {}
    assert result == RESULT


def test_a_result_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"result\.json"):
        read_result(tmp_path)


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(OSError, match=r"result\.json"):
        write_result(tmp_path, RESULT)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_tables_sort_delays_as_numbers_and_names_after_them(tmp_path: Path) -> None:
    delays = ["0", "1", "2", "2 clip=1", "10", "pipedream", "pipedream clip=1"]
    keys = [CellKey(Row(Group("A", None), delay, None, "none"), 0.1, 1) for delay in delays]
    write_tables(tmp_path, "t", dict.fromkeys(reversed(keys), RESULT), {key: key.row.delay for key in keys})
    with (tmp_path / "results.csv").open(newline="") as file:
        assert [row["delay"] for row in csv.DictReader(file)] == delays


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("docs/evidence/*/results.csv")), ids=str)
def test_the_published_tables_are_in_this_order(path: Path, tmp_path: Path) -> None:
    runs, _ = read_results(path)
    cells = {CellKey(run.row, run.lr, run.seed): run.cell for run in runs}
    write_tables(tmp_path, runs[0].table, dict.fromkeys(reversed(cells), RESULT), cells)
    assert [run.cell for run in read_results(tmp_path / "results.csv")[0]] == [run.cell for run in runs]


def test_long_curves_are_thinned_to_means() -> None:
    curve = [(step, float(step)) for step in range(1, 1001)]
    assert len(thinned(curve)) == 200
    assert thinned(curve)[:2] == [(5, 3.0), (10, 8.0)]
    assert thinned(curve[:3]) == curve[:3]
    assert thinned([]) == []
