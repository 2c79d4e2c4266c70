"""Recipes: every key explained, the twins alike, each loadable, and the quickstart better than counting bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_asyncpp.cli import main
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.data.unigram import unigram_loss
from lightning_asyncpp.tools.ablation.recipe.check import find_problems
from lightning_asyncpp.tools.ablation.recipe.recipe import load_recipe
from lightning_asyncpp.tools.ablation.recipe.rows import make_rows

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ABLATIONS = sorted((ROOT / "recipes" / "ablation").glob("*.yaml"))
TRAINED = sorted((ROOT / "recipes" / "ablation" / "base").glob("*.yaml"))
STRUCTURE = {
    "trainer",
    "model",
    "data",
    "logger",
    "callbacks",
    "config",
    "class_path",
    "init_args",
    "base",
    "optimizer",
}


def run(*arguments: str, cwd: Path, timeout: int = 280) -> str:
    command = ["timeout", "-k", "10", str(timeout), sys.executable, "-m", "lightning_asyncpp", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path", RECIPES + TRAINED, ids=lambda path: path.stem)
def test_every_key_has_a_comment_above(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = []
    for above, line in zip(["", *lines], lines):
        key = re.match(r"\s*(?:- )?(\w+):", line)
        if key and key.group(1) not in STRUCTURE and not above.lstrip().startswith("#"):
            bare.append(line.strip())
    assert not bare


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_ablations_are_valid_and_explain_their_keys(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert make_rows(recipe)
    lines = path.read_text().splitlines()
    keys = [(above, line) for above, line in zip(["", *lines], lines) if re.match(r"\w+:", line)]
    assert all(above.startswith("#") for above, _ in keys)


@pytest.mark.slow
@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_every_training_of_an_ablation_can_be_configured(path: Path) -> None:
    assert find_problems(load_recipe(path)) == []


def test_the_synchronous_twin_differs_in_the_strategy_alone() -> None:
    twins = [
        yaml.safe_load((ROOT / "recipes" / name).read_text()) for name in ("quickstart.yaml", "quickstart_sync.yaml")
    ]
    strategies = [twin["trainer"].pop("strategy") for twin in twins]
    assert twins[0] == twins[1]
    assert [s["class_path"].rpartition(".")[2] for s in strategies] == ["AsyncPipelineStrategy", "SyncPipelineStrategy"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_accepted_and_printed_with_overrides(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncpp"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main([
            "fit", "--config", str(path), "--trainer.max_steps", "7",
            "--optimizer", "lightning_asyncpp.optim.MuonAdamW", "--optimizer.lr", "0.004", "--print_config",
        ])  # fmt: skip
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_steps"] == 7
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"] == "lightning_asyncpp.optim.MuonAdamW"
    assert optimizer["init_args"]["lr"] == 0.004


def test_quickstart_beats_a_unigram_model(tmp_path: Path) -> None:
    """Fewer updates, on less text."""
    check_quickstart(
        tmp_path, 0.3, max_steps=40, val_check_interval=40, limit_val_batches=12, data={"max_bytes": 2_000_000}
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_quickstart_is_well_below_a_unigram_model(tmp_path: Path) -> None:
    check_quickstart(tmp_path, 1.5)


def check_quickstart(folder: Path, margin: float, data: dict[str, Any] | None = None, **trainer: int) -> None:
    """``data`` and ``trainer`` replace arguments of the recipe."""
    data = {"cache_dir": str(folder / "cache"), **(data or {})}
    arguments = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    arguments += [f"--data.init_args.{name}={value}" for name, value in data.items()]
    printed = run("fit", "--config", str(ROOT / "recipes" / "quickstart.yaml"), *arguments, cwd=folder, timeout=800)
    assert "Done. Checkpoint: " in printed
    assert list((folder / "runs" / "quickstart").glob("**/events.out.tfevents.*"))
    (checkpoint,) = (folder / "runs").glob("**/*.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    assert sum(value.numel() for value in content["state_dict"].values()) > 800_000
    val_loss = float(re.search(r"val_loss=([\d.]+)\.ckpt", checkpoint.name).group(1))  # type: ignore[union-attr]
    assert val_loss < unigram(data) - margin


def unigram(replaced: dict[str, Any]) -> float:
    config: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())["data"]["init_args"]
    data = TextDataModule(**{**config, **replaced})
    data.prepare_data()
    data.setup("fit")
    train, val = (
        torch.cat([batch.flatten() for batch in loader]) for loader in (data.train_dataloader(), data.val_dataloader())
    )
    loss = unigram_loss(train, val, 256)
    assert np.isfinite(loss)
    return float(loss)
