"""Reading the CSV files: what is wrong is named by file and line; and what is written beside them."""

from __future__ import annotations

import sys
from dataclasses import fields

import pytest

from lightning_asyncpp.tools.ablation.grid import Open, Run
from lightning_asyncpp.tools.ablation.report.__main__ import main, write_report
from lightning_asyncpp.tools.ablation.results import ResultsError, read_curves, read_results
from tests.tools.ablation.examples import left, run, seeds, whole_grid, write_curves, write_open, write_results

RESULT_COLUMNS = [column.name for column in fields(Run) if column.name != "variant"]  # older files have none
HEADER = ",".join(RESULT_COLUMNS)
LINE = "demo,Muon,none,1,,,0.01,1,finished,1.5,600,40.0,a"


def results(folder, *lines, header=HEADER):
    path = folder / "results.csv"
    path.write_text("\n".join([header, *lines, ""]))
    return path


def refused(folder, *lines, **header):
    with pytest.raises(ResultsError) as caught:
        read_results(results(folder, *lines, **header))
    return str(caught.value).replace(str(folder / "results.csv"), "FILE")


def test_what_is_written_is_read_again(tmp_path):
    runs = whole_grid() + seeds([None, 1.5], optimizer="Lion", delay="2 micro_batches=4", stages=3, variant="long")
    assert read_results(write_results(tmp_path, runs)) == (runs, [])


def test_columns_are_found_by_name_and_an_empty_correction_is_none(tmp_path):
    header = "note," + ",".join(reversed(RESULT_COLUMNS))
    line = "x," + ",".join(reversed(LINE.replace("none", "").split(",")))
    (read,), _ = read_results(results(tmp_path, line, header=header))
    assert (read.optimizer, read.correction, read.loss, read.stages, read.momentum) == ("Muon", "none", 1.5, None, None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.01", "fast", 'lr is "fast"; expected a positive number'),
        ("0.01", "-1", 'lr is "-1"; expected a positive number'),
        ("1.5", "nan", 'loss is "nan"; expected a finite number'),
        ("1.5", "", 'loss is ""; expected a finite number'),
        ("600", "6e2", 'steps is "6e2"; expected a whole number'),
        ("finished", "running", 'status is "running"; expected finished or diverged'),
        ("finished", "diverged", 'loss is "1.5" although the run diverged; expected nothing'),
        (",a", "", "not as many fields as the header names"),
        (",a", ",a,b", "not as many fields as the header names"),
    ],
)
def test_a_garbled_line_is_named(tmp_path, old, new, message):
    good = LINE.replace("Muon", "Lion")
    assert refused(tmp_path, good, LINE.replace(old, new)) == f"FILE:3: {message}"


def test_all_garbled_lines_are_named_at_once(tmp_path):
    text = refused(tmp_path, LINE.replace("600", "x"), LINE, LINE.replace("40.0", "soon"))
    assert [line.split(" is ")[0] for line in text.splitlines()] == ["FILE:2: steps", "FILE:4: seconds"]
    many = refused(tmp_path, *[LINE.replace("600", "x")] * 25)
    assert many.endswith("\n... and 5 more")


def test_a_missing_column_and_a_missing_file_are_named(tmp_path):
    text = refused(tmp_path, LINE, header=",".join(RESULT_COLUMNS[:-2]))
    assert text.startswith("FILE:1: no column seconds, cell; expected table,optimizer")
    with pytest.raises(ResultsError, match=r"nowhere/results\.csv: no such file; `asyncpp ablate RECIPE` writes it"):
        read_results(tmp_path / "nowhere" / "results.csv")


def test_the_same_run_twice_and_two_ablations_in_one_file_are_refused(tmp_path):
    twice = refused(tmp_path, LINE, LINE.replace(",a", ",b"))
    assert twice == "FILE:3: repeats the row, learning rate and seed of line 2; keep one"
    two = refused(tmp_path, LINE, LINE.replace("demo", "other").replace("Muon", "Lion"))
    assert two == "FILE: holds several ablations (demo, other); a folder holds one"


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    path.write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(ResultsError, match=r"results\.csv: not a CSV file"):
        read_results(path)


def test_curves_hold_the_validation_loss_by_step_and_name_garbled_lines(tmp_path):
    path = tmp_path / "curves.csv"
    assert read_curves(path) == {}
    path.write_text(
        "cell,step,metric,value\na,20,val_loss,1.5\na,10,val_loss,2\na,10,train_loss,9\nb,10,val_loss,inf\n"
    )
    assert read_curves(path)["val_loss"] == {"a": [(10, 2.0), (20, 1.5)], "b": [(10, float("inf"))]}
    path.write_text("cell,step,metric,value\na,1.5,val_loss,1\na,2,val_loss,low\n")
    with pytest.raises(ResultsError) as caught:
        read_curves(path)
    assert (
        str(caught.value)
        == f'{path}:2: step is "1.5"; expected a whole number\n{path}:3: value is "low"; expected a number'
    )


def test_what_is_open_is_read_where_it_is_written(tmp_path):
    path = write_results(tmp_path, [run(1.5, delay="0")])
    assert read_results(path)[1] == []
    write_open(tmp_path, [])
    assert read_results(path)[1] == []
    ones = [left(0.5, 3, log="cells/a/log.txt"), left(None, delay="2", stages=4, momentum=0.9, correction="EF")]
    write_open(tmp_path, ones)
    assert read_results(path)[1] == ones


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Muon,none,1,,,0.01,1,lost,", 'status is "lost"; expected failed or pending'),
        ("Muon,none,1,,,,1,failed,x", 'lr is ""; expected a positive number'),
        ("Muon,none,1,,,0.01,,pending,", 'seed is ""; expected a whole number'),
        ("Muon,none,1,,,0.01,1,pending", "not as many fields as the header names"),
    ],
)
def test_a_garbled_line_of_what_is_open_is_named_beside_those_of_the_results(tmp_path, line, message):
    path = tmp_path / "open.csv"
    path.write_text("\n".join([",".join(column.name for column in fields(Open) if column.name != "variant"), line, ""]))
    text = refused(tmp_path, LINE.replace("600", "x")).splitlines()
    assert text == ['FILE:2: steps is "x"; expected a whole number', f"{path}:2: {message}"]


def test_the_page_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_results(tmp_path, [run(1.5, delay="0")])
    write_report(tmp_path)
    before = (tmp_path / "table.md").read_text()
    write_results(tmp_path, [run(1.7, delay="0")])
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path)
    assert (tmp_path / "table.md").read_text() == before


def test_a_failed_training_is_on_the_page_and_in_the_tables(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_results(tmp_path, [run(0.1, lr=0.1), run(0.7, lr=0.7)])
    write_open(tmp_path, [left(0.5, log="cells/a/log.txt")])
    write_report(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "- Muon, delay 1, lr 0.5, seed 1: `cells/a/log.txt`" in text
    assert "0.100 (0.1 §)" in text


def test_without_matplotlib_the_tables_are_written_all_the_same(tmp_path, monkeypatch, capsys):
    write_results(tmp_path, [run(1.5, delay="0"), run(1.6)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(tmp_path)
    assert 'pip install "lightning-asyncpp[plots]"' in capsys.readouterr().err
    assert "+0.100" in (tmp_path / "table.md").read_text()
    assert not list(tmp_path.glob("*.svg"))


def test_the_command_writes_the_report_or_ends_with_the_problem(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_curves(tmp_path, runs := [run(1.5, delay="0"), run(1.6)])
    write_results(tmp_path, runs)
    main([str(tmp_path)])
    assert "table.md and 2 plots" in capsys.readouterr().out
    assert "![gaps](gaps.svg)\n\n![curves](curves.svg)" in (tmp_path / "table.md").read_text()
    results(tmp_path, LINE.replace("600", "x"))
    with pytest.raises(SystemExit, match=r"results\.csv:2: steps"):
        main([str(tmp_path)])
