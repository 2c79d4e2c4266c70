"""A small ablation for tests: a text folder, a recipe of `asyncpp fit`, and a grid on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.ablation.recipe.recipe import Recipe, read_recipe
from lightning_asyncpp.tools.ablation.recipe.yaml_files import write_yaml

FIT: dict[str, Any] = {
    "trainer": {
        "max_steps": 12, "max_epochs": -1, "val_check_interval": 5, "check_val_every_n_epoch": None,
        "limit_val_batches": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 5,
        "callbacks": [{"class_path": "lightning_asyncpp.TokensPerSecond"}],
    },
    "model": {
        "class_path": "lightning_asyncpp.GPTModule",
        "init_args": {
            "config": {
                "vocab_size": 256, "context_length": 32, "num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1,
            },
        },
    },
    "data": {
        "class_path": "lightning_asyncpp.data.TextDataModule",
        "init_args": {"context_length": 32, "batch_size": 4, "val_fraction": 0.2},
    },
}  # fmt: skip

ADAMW: dict[str, Any] = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"betas": [0.9, 0.95], "weight_decay": 0.1},
    "lr": [0.001, 0.01],
}

EF: dict[str, Any] = {"class_path": "lightning_asyncpp.optim.ErrorFeedback", "init_args": {}}


class Fragile(torch.optim.AdamW):
    """AdamW that can be built with any momentum, and breaks at the first step with less than 0.5."""

    def step(self, closure: Any = None) -> Any:
        """As AdamW's."""
        if self.param_groups[0]["betas"][0] < 0.5:
            raise ArithmeticError("this momentum is too low")
        return super().step(closure)


def grid(**changes: Any) -> dict[str, Any]:
    """A grid of two learning rates without a delay; ``changes`` replace keys, ``None`` removes them."""
    content: dict[str, Any] = {
        "name": "tiny", "recipe": "fit.yaml", "output": "out", "seeds": [1], "lr_extensions": 0,
        "optimizers": {"AdamW": copy.deepcopy(ADAMW)}, "delays": [0],
    }  # fmt: skip
    return {key: value for key, value in (content | changes).items() if value is not None}


def write_ablation(folder: Path, text: bool = True, **changes: Any) -> Path:
    """Write the grid with what it needs, and return its path."""
    fit = copy.deepcopy(FIT)
    fit["data"]["init_args"] |= {"source": str(folder / "text"), "cache_dir": str(folder / "cache")}
    write_yaml(folder / "fit.yaml", fit)
    write_yaml(folder / "grid.yaml", grid(**changes))
    if text and not (folder / "text").exists():
        (folder / "text").mkdir()
        for index in range(20):
            lines = [f"document {index} line {line} {index * line}\n" for line in range(30)]
            (folder / "text" / f"{index}.txt").write_text("".join(lines))
    return folder / "grid.yaml"


def load_recipe(path: Path) -> Recipe:
    """A recipe without problems; else all of them at once."""
    recipe, problems = read_recipe(path)
    if problems or recipe is None:
        raise ConfigurationError.from_problems(problems)
    return recipe
