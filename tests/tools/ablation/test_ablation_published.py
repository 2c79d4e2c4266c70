"""``asyncpp ablate RECIPE --published FOLDER``: what the tables of others hold is not run again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.ablation import ablate
from tests.tools.ablation.pretending import results_of
from tests.tools.ablation.small import ADAMW, write_ablation

pytestmark = pytest.mark.usefixtures("pretend", "quick")
FILES = ("results.csv", "curves.csv")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The folder of tables that somebody has published: one with a run that diverged, and one without."""
    for name, lrs in (("tiny", [0.1, 9.0]), ("other", [0.2])):
        path = write_ablation(tmp_path, text=False, name=name, optimizers=optimizers(lrs))
        ablate.main([str(path), "--threads", "3"])
        (tmp_path / "docs" / name).mkdir(parents=True)
        for file in FILES:
            shutil.copy(tmp_path / "out" / name / file, tmp_path / "docs" / name)
    shutil.rmtree(tmp_path / "out")
    return tmp_path / "docs"


def optimizers(lrs: list[float]) -> dict[str, Any]:
    return {"AdamW": ADAMW | {"lr": lrs}}


def runs_of(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "out" / "cells").glob("*/runs"))


def test_a_published_table_is_made_again_without_a_run(tmp_path: Path, published: Path) -> None:
    path = write_ablation(tmp_path, text=False, optimizers=optimizers([0.1, 9.0]))
    ablate.main([str(path), "--threads", "3", "--published", str(published / "tiny")])
    assert runs_of(tmp_path) == []
    for file in FILES:
        assert (tmp_path / "out" / "tiny" / file).read_bytes() == (published / "tiny" / file).read_bytes()
    assert [row["status"] for row in results_of(tmp_path / "out" / "tiny")] == ["finished", "diverged"]


def test_only_what_no_published_table_has_is_run(
    tmp_path: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_ablation(tmp_path, text=False, name="third", optimizers=optimizers([0.05, 0.1, 0.2])))
    ablate.main([path, "--dry-run", "--published", str(published)])
    assert "at most 3 runs in total; 2 done" in capsys.readouterr().out
    ablate.main([path, "--threads", "3", "--published", str(published)])
    (own,) = runs_of(tmp_path)
    rows = {row["lr"]: row for row in results_of(tmp_path / "out" / "third")}
    assert rows["0.05"]["cell"] == own
    for name, lr in (("tiny", "0.1"), ("other", "0.2")):
        assert rows[lr] == next(row for row in results_of(published / name) if row["lr"] == lr) | {"table": "third"}


def test_a_run_of_ones_own_goes_before_a_published_one(tmp_path: Path, published: Path) -> None:
    path = str(write_ablation(tmp_path, text=False, optimizers=optimizers([0.1])))
    ablate.main([path, "--threads", "3"])
    results = published / "tiny" / "results.csv"
    results.write_text(results.read_text().replace("finished,0.1,", "finished,0.125,"))
    ablate.main([path, "--threads", "3", "--published", str(published)])
    assert [row["loss"] for row in results_of(tmp_path / "out" / "tiny")] == ["0.1"]


def test_a_folder_without_tables_or_with_a_garbled_one_is_refused(
    tmp_path: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_ablation(tmp_path, text=False))
    (published / "other" / "results.csv").write_text("loss\n1\n")
    for folder, message in (
        (tmp_path / "nothing", "there is no results.csv in it"),
        (published, f"{published / 'other' / 'results.csv'}:1: no column table"),
    ):
        with pytest.raises(SystemExit) as end:
            ablate.main([path, "--published", str(folder)])
        assert end.value.code == 2
        assert f"--published='{folder}': " in (told := capsys.readouterr().err)
        assert message in told
    assert not (tmp_path / "out").exists()
