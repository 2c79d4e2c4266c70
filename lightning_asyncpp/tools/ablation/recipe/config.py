"""The recipe of `asyncpp fit` that one training of an ablation runs, and its name."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.ablation.recipe.recipe import Delay, Recipe
from lightning_asyncpp.tools.ablation.recipe.rows import Row
from lightning_asyncpp.tools.ablation.recipe.section import set_at
from lightning_asyncpp.tools.ablation.recipe.sources import own_sources

# What the base recipe logs, saves and draws is not wanted once per training.
LEFT_OUT = ("logger", "callbacks", "default_root_dir", "accelerator", "num_nodes")
_RECORDER = "lightning_asyncpp.tools.ablation.run.recorder.Recorder"


def cell_config(recipe: Recipe, row: Row, lr: float, seed: int) -> dict[str, Any]:
    """The base recipe with everything set that decides the result of this training."""
    strategy = strategy_config(recipe, row.delay)
    return training_config(recipe, seed, strategy, row.grid.build(lr, row.momentum, row.correction))


def strategy_config(recipe: Recipe, delay: Delay) -> dict[str, Any]:
    """Class and arguments of the strategy that delays the gradients."""
    return {"class_path": recipe.strategy, "init_args": copy.deepcopy(dict(delay.init_args))}


def training_config(
    recipe: Recipe, seed: int, strategy: str | dict[str, Any], optimizer: dict[str, Any] | None
) -> dict[str, Any]:
    """The base recipe with a seed, a strategy and an optimizer; ``None`` for the module's own."""
    config = copy.deepcopy(dict(recipe.base))
    config["seed_everything"] = seed
    for place in recipe.seed_arguments:
        set_at(config, place, seed)
    trainer = config.setdefault("trainer", {})
    for key in LEFT_OUT:
        trainer.pop(key, None)
    for key in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        trainer[key] = False
    trainer |= {"devices": 1, "strategy": strategy}
    config.pop("optimizer", None)
    set_at(config, "model.init_args.optimizer", optimizer)
    return config


def with_places(config: dict[str, Any], recipe: Recipe, folder: Path, accelerator: str) -> dict[str, Any]:
    """Add what does not decide the result: where it is written and on what it runs."""
    config = copy.deepcopy(config)
    logger = {"save_dir": str(folder), "name": "", "version": "logs"}
    optimizer = config.get("model", {}).get("init_args", {}).get("optimizer") or {}
    recorder = {
        "folder": str(folder), "metric": recipe.metric, "diverged_above": recipe.diverged_above,
        "optimizer": optimizer.get("class_path"),
    }  # fmt: skip
    config["trainer"] |= {
        "accelerator": accelerator,
        "default_root_dir": str(folder),
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logger},
        "callbacks": [{"class_path": _RECORDER, "init_args": recorder}],
    }
    return config


def cell_name(recipe: Recipe, row: Row, lr: float, seed: int) -> str:
    """Name of the training's folder: readable, with a hash of everything that decides the result."""
    content: dict[str, Any] = {
        "config": cell_config(recipe, row, lr, seed),
        "metric": recipe.metric,
        "diverged_above": recipe.diverged_above,
    }
    if sources := own_sources(content["config"]):
        content["sources"] = sources
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:10]
    return re.sub(r"[^\w.+=-]", "-", f"{row.name}_lr{lr:g}_seed{seed}_{digest}")


def digest_of(name: str) -> str:
    """The part of a training's name that tells what it trains."""
    return name.rpartition("_")[2]
