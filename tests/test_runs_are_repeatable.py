"""The same recipe twice, as real processes: the same weights, losses and metrics, to the last bit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_command_line import ASYNCPP, ROOT, run, write_text

STEPS = 12
TIMES = ("tokens_per_second", "bubble", "hidden", "mfu", "seconds", "time", "utilisation", "utilization")


def arguments(folder: Path, recipe: str) -> list[str]:
    """A quickstart with a small model, on the text of ``folder``, shortened."""
    sizes = {
        "data.init_args.source": folder / "text", "data.init_args.cache_dir": folder / "cache",
        "data.init_args.val_fraction": 0.2, "data.init_args.batch_size": 8, "data.init_args.context_length": 32,
        "model.init_args.config.context_length": 32, "model.init_args.config.num_layers": 3,
        "model.init_args.config.dim": 32, "trainer.limit_val_batches": 3, "trainer.max_steps": STEPS,
        "trainer.val_check_interval": 4, "trainer.log_every_n_steps": 1,
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger", "trainer.logger.save_dir": folder / "runs",
    }  # fmt: skip
    given = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return ["fit", "--config", str(ROOT / "recipes" / f"{recipe}.yaml"), *given]


def results(folder: Path, recipe: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The checkpoint of a run, and what it logged without times."""
    folder.mkdir()
    write_text(folder)
    run([*ASYNCPP, *arguments(folder, recipe)], folder)
    (checkpoint,) = (folder / "runs").glob(f"**/step={STEPS}-*.ckpt")
    (metrics,) = (folder / "runs").glob("**/metrics.csv")
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    kept = [{name: value for name, value in row.items() if not any(t in name for t in TIMES)} for row in rows]
    content = torch.load(checkpoint, weights_only=True)
    return {name: value for name, value in content.items() if name != "callbacks"}, kept  # without names of folders


def tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a nested state, by its place in it."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{path}/{key}").items()}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_moe"])
def test_a_recipe_twice(recipe: str, tmp_path: Path) -> None:
    (first, logged), (second, logged_again) = (results(tmp_path / name, recipe) for name in ("first", "second"))
    found, again = (
        {name: t for name, t in tensors(content).items() if "/logged/" not in name or not any(w in name for w in TIMES)}
        for content in (first, second)
    )
    assert found.keys() == again.keys()
    assert any("older_weights" in name for name in found)
    assert any("optimizer_states" in name for name in found)
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, again[name])]
    assert logged == logged_again
    names = {name for row in logged for name, value in row.items() if value}
    assert {"train_loss", "val_loss"} <= names
    assert ("moe_entropy" in names) == (recipe == "quickstart_moe")
    assert len([row for row in logged if row["train_loss"]]) == STEPS
