"""Published tables and predictions follow from the published CSV files, which the recipes find."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.models import GPT, GPTConfig
from research.ablations import extrapolation, law, lengths, results
from research.ablations.embed import embedded
from research.ablations.recipe import Recipe
from research.ablations.results import CURVES, RESULTS, write_table
from research.ablations.summary import Ablation
from research.ablations.table import Table
from research.ablations.tables import page

ROOT = Path(__file__).parents[3]
PLACES = ROOT / "docs" / "evidence", ROOT / "research" / "two_bw"
EVIDENCE = sorted(found.parent for place in PLACES for found in place.glob(f"*/{RESULTS}"))
RECIPES = sorted((ROOT / "research").glob("*/*.yaml"))
INCOMPLETE = ("large", "sizes", "lengths", "phases", "starts_long")
read_runs, read_curves = cache(results.read_runs), cache(results.read_curves)  # shared by several tests
by_name = pytest.mark.parametrize("folder", EVIDENCE, ids=lambda path: path.name)


@by_name
def test_csv_files_are_written_as_they_were_read(folder: Path, tmp_path: Path) -> None:
    write_table(tmp_path, *read_runs(folder), read_curves(folder))
    assert (tmp_path / CURVES).read_bytes() == (folder / CURVES).read_bytes()
    written, published = ((path / RESULTS).read_text().splitlines() for path in (tmp_path, folder))
    if not published[0].endswith(",variant"):  # a column that older tables lack
        written = [line.removesuffix(",").removesuffix(",variant") for line in written]
    assert written == published


@by_name
def test_tables_follow_from_the_csv_files(folder: Path) -> None:
    pictures = sorted(path.name for path in folder.glob("*.svg"))
    texts = page(Ablation.of(*read_runs(folder)), pictures), (folder / "table.md").read_text()
    (new, new_plots), (old, old_plots) = (text.partition("## Plots")[::2] for text in texts)
    assert new == old
    assert sorted(new_plots.split()) == sorted(old_plots.split())


@pytest.mark.parametrize(("name", "tables"), [("notes/evidence.md", 8), ("two_bw/README.md", 5)])
def test_tables_in_the_notes_follow_from_the_csv_files(name: str, tables: int) -> None:
    notes = ROOT / "research" / name
    assert embedded(notes) == notes.read_text()
    assert notes.read_text().count("<!-- table: ") == tables


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_find_what_is_published(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.ablations.table.read_runs", lambda folder: read_runs(folder.resolve()))
    monkeypatch.setattr("research.ablations.table.read_curves", lambda _: pd.DataFrame())
    monkeypatch.setattr(Table, "cell", lambda *_: tmp_path / "none_was_trained_here")  # saves a costly digest
    recipe = Recipe.read(path)
    assert recipe.name == path.stem
    table = Table(recipe, tmp_path)
    plan, missing = table.plan(list(table.arms.values()))
    assert (not missing and not plan.waiting) == (path.stem not in INCOMPLETE)
    assert bool(recipe.published) == bool(table.runs)
    for arm in table.arms.values():
        config = recipe.config(arm, arm.lrs[0], 7)
        assert config["seed_everything"] == config["data"]["init_args"]["seed"] == 7


@pytest.mark.parametrize("base", ["small", "packages"])
def test_models_are_cut_into_four_stages_as_for_the_published_results(base: str) -> None:
    """New runs with another cut could not be compared with the published results."""
    config = yaml.safe_load((ROOT / "research" / "ablations" / "base" / f"{base}.yaml").read_text())
    with torch.device("meta"):
        model = GPT(GPTConfig(**config["model"]["init_args"]["config"]))
    assert choose_partition(model, 0, 4, "auto").counts == (2, 1, 1, 2)


def test_predictions_are_those_that_were_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    extrapolation.main([str(ROOT / "research/two_bw/budget"), "--until", "1200", "--at", "2400"])
    extrapolation.main([str(ROOT / "docs/evidence/sizes"), "--until", "0.3", "--at", "0.49"])
    lengths.main([str(ROOT / "docs/evidence/sizes"), "--gain", "1.38"])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "_delay" not in line] == [
        "Muon, delay 1, EF, from 600, 1200 updates:",
        "  2400: +0.006, 95 % between -0.014 and +0.033",
        "Muon, delay least microbatches=8, EF, from 600, 1200 updates:",
        "  2400: -0.000, 95 % between -0.010 and +0.010",
        "AdamW-ahead, delay least microbatches=8, none, from 0.14, 0.25 million parameters:",
        "  0.49: +0.029, 95 % between +0.011 and +0.046",
        "Muon-ahead, delay least microbatches=8, none, from 0.14, 0.25 million parameters:",
        "  0.49: +0.001, 95 % between -0.017 and +0.021",
        "AdamW-ahead, pooled: loss ± 0.0051, updates ± 0.03, faster ± 0.03",
        "Muon-ahead, pooled: loss ± 0.0128, updates ± 0.08, faster ± 0.11",
    ]


@pytest.mark.slow
def test_the_law_is_that_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    law.main([str(ROOT / "docs/evidence/law")])
    number = r"([+-]?\d+\.\d+)"
    line = rf"(?m)^  (?:a|b|clips_ahead|phi \S+:) {number}, 95 % {number} to {number}$"
    printed = re.findall(line, capsys.readouterr().out)  # a, b, c and four costs of each optimizer
    rows = re.findall(r"(?m)^\| (?:AdamW|Muon).*? \| \d\.\d+ \(.*", (ROOT / "docs/research/evidence.md").read_text())
    shown = [re.findall(rf"{number} \({number} to {number}\)", row) for row in rows]
    for (a, b, *costs, c), places in zip(shown, range(0, len(printed), 7), strict=True):
        expected = printed[places : places + 7]
        for values, exact in zip((a, b, c, *costs), expected, strict=True):
            for text, value in zip(values, exact, strict=True):
                assert abs(float(text) - float(value)) <= 0.51 * 10 ** -len(text.partition(".")[2])
