"""The folders and tables of an ablation: what is read, kept and listed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.ablation.recipe.rows import Plan
from lightning_asyncpp.tools.ablation.run.conditions import slots
from lightning_asyncpp.tools.ablation.run.training_runner import Runner, Running
from tests.tools.ablation.pretending import Told, results_of, run, table_of
from tests.tools.ablation.small import ADAMW, EF, write_ablation


@pytest.mark.usefixtures("pretend")
def test_a_half_written_run_is_discarded_and_run_again(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1, 0.2])
    run(table)
    folder = next((table.folder.parent / "cells").glob("*lr0.2*"))
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text[: len(text) // 2])
    (folder / "left over").touch()
    again = table_of(tmp_path, [0.1, 0.2])
    _, told = run(again)
    assert told.names == ["0.2/1:finished"]
    assert not (folder / "left over").exists()
    assert (folder / "runs").read_text() == "x"


@pytest.mark.usefixtures("pretend")
def test_a_result_that_is_not_understood_is_run_again_and_kept_aside(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1])
    run(table)
    folder = table.folder.parent / "cells" / results_of(table.folder)[0]["cell"]
    for number in (1, 2):
        (folder / "result.json").write_text('{"status": "finished in 2031"}')
        _, told = run(table_of(tmp_path, [0.1]))
        assert told.names == ["0.1/1:finished"]
        kept = folder.with_name(f"{folder.name}.bak-{number}")
        assert (kept / "result.json").read_text() == '{"status": "finished in 2031"}'
        assert len(told.warnings) == 1
        assert str(kept) in told.warnings[0]
    assert run(table_of(tmp_path, [0.1]))[1].names == []


@pytest.mark.usefixtures("pretend")
def test_what_another_row_of_another_name_has_trained_is_taken_over(tmp_path: Path) -> None:
    run(table_of(tmp_path, [0.1, 0.2]))
    beta = {"argument": "betas.0", "values": [0.9, 0.5]}
    table = table_of(tmp_path, [0.1, 0.2], optimizers={"other": ADAMW | {"lr": [0.1, 0.2], "momentum": beta}})
    _, told = run(table)
    assert sorted(told.names) == ["0.1/1:finished", "0.2/1:finished"]  # of the momentum that is new
    rows = results_of(table.folder)
    assert [row["optimizer"] for row in rows] == ["other"] * 4
    assert sorted(row["cell"].partition("_")[0] for row in rows) == ["AdamW", "AdamW", "other", "other"]


@pytest.mark.usefixtures("pretend")
def test_the_same_training_in_two_rows_is_run_once_and_named_once(tmp_path: Path) -> None:
    same: dict[str, Any] = {"corrections": {"none": None, "A": EF, "B": EF}, "delays": [1], "seeds": [1, 2]}
    table = table_of(tmp_path, [0.1, 0.5], **same)
    _, told = run(table, workers=3)
    assert sorted(told.names) == ["0.1/1:finished"] * 2 + ["0.5/1:failed"] * 2
    table = table_of(tmp_path, [0.1, 0.2], **same)
    _, told = run(table, workers=3)
    assert sorted(told.names) == ["0.1/2:finished"] * 2 + ["0.2/1:finished"] * 2
    cells = {(row["correction"], row["lr"], row["seed"]): row["cell"] for row in results_of(table.folder)}
    assert len(cells) == 9
    for lr, seed in (("0.1", "1"), ("0.1", "2"), ("0.2", "1")):
        assert cells["A", lr, seed] == cells["B", lr, seed] != cells["none", lr, seed]
        assert (table.folder.parent / "cells" / cells["A", lr, seed] / "result.json").exists()
    with (table.folder / "curves.csv").open(newline="") as file:
        assert sorted(row["cell"] for row in csv.DictReader(file)) == sorted([*set(cells.values())] * 2)


@pytest.mark.usefixtures("pretend")
def test_of_two_folders_of_a_training_its_own_is_read(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1])
    run(table)
    cells = table.folder.parent / "cells"
    own = cells / results_of(table.folder)[0]["cell"]
    for other in ("A", "z"):
        folder = cells / f"{other}_lr0.1_{own.name.rpartition('_')[2]}"
        folder.mkdir()
        (folder / "result.json").write_text((own / "result.json").read_text().replace("9.0", "8.0"))
    run(table_of(tmp_path, [0.1]))
    assert results_of(table.folder)[0]["cell"] == own.name
    (own / "result.json").unlink()
    run(table_of(tmp_path, [0.1]))
    assert results_of(table.folder)[0]["cell"].startswith("A_")


@pytest.mark.usefixtures("pretend")
def test_what_has_no_result_is_listed_with_the_logs_of_what_failed(tmp_path: Path) -> None:
    def listed() -> list[tuple[str, ...]]:
        with (table.folder / "open.csv").open(newline="") as file:
            header, *lines = csv.reader(file)
        assert " ".join(header) == "optimizer correction delay stages momentum lr seed status log variant"
        return [tuple(line) for line in lines]

    class Interrupting(Told):
        def show(self, plan: Plan, running: Sequence[Running]) -> None:
            if self.names and any(r.progress() for r in running):
                raise KeyboardInterrupt

    same = {"corrections": {"none": None, "EF": EF | {"lr": "same"}}, "delays": [1], "seeds": [1, 2]}
    table = table_of(tmp_path, [0.1, 0.25, 0.5], **same)
    rows = sorted(table.rows.values(), key=lambda row: row.correction.name)
    with pytest.raises(KeyboardInterrupt):  # 0.1 is over, 0.25 under way
        Runner(table, rows, slots(1, 3, []), "cpu", Interrupting()).run()
    pending = [("AdamW", "none", "1", "", "", lr, "1", "pending", "", "") for lr in ("0.25", "0.5")]
    waiting = ("AdamW", "EF", "1", "", "", "", "", "pending", "", "")
    assert listed() == [*pending, waiting]
    assert "0.1" in (table.folder / "table.md").read_text()

    table = table_of(tmp_path, [0.1, 0.5], **same)
    run(table)
    ((*_, status, log, _), last) = listed()
    assert (status, last) == ("failed", waiting)
    assert "this one fails" in (table.folder / log).read_text()
    table_of(tmp_path, [0.1, 0.5], **same).write()
    assert listed()[0][-3:-1] == ("failed", log)  # also for those who did not see it fail

    table = table_of(tmp_path, [0.1], **same)
    run(table)
    assert listed() == []


def test_a_table_stays_that_of_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = table_of(tmp_path, [0.1]), table_of(tmp_path / "other", [0.2])
    other.folder = one.folder
    one.check_recipe()  # there is no table yet
    one.keep_recipe()
    one.check_recipe()
    with pytest.raises(ConfigurationError, match=f"name: .*tiny is the table of another recipe, {one.recipe.path}"):
        other.check_recipe()
    write_ablation(tmp_path, text=False, delays=[3])  # edited
    one.check_recipe()
    one.recipe.path.rename(tmp_path / "other" / "grid.yaml")  # moved, over the other one
    other.check_recipe()
    table_of(tmp_path, [0.2])
    (tmp_path / "copy.yaml").write_bytes(other.recipe.path.read_bytes())
    other.keep_recipe()
    other.check_recipe()
