"""The recipe of `asyncpp fit` that one training of an ablation runs, and its name.

The name tells what decides the result: the recipe, and of the user's own code the files of the classes that it names. A
run made with other code is another run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.ablation.recipe.recipe import BASE, Delay, Recipe, Variant
from lightning_asyncpp.tools.ablation.recipe.rows import RowRecipe
from lightning_asyncpp.tools.ablation.recipe.yaml_files import set_at

# What the base recipe logs, saves and draws is not wanted once per training.
LEFT_OUT = ("logger", "callbacks", "default_root_dir", "accelerator", "num_nodes")
_RECORDER = "lightning_asyncpp.tools.ablation.run.recorder.Recorder"


def cell_config(recipe: Recipe, row: RowRecipe, lr: float, seed: int) -> dict[str, Any]:
    """The base recipe with everything set that decides the result of this training."""
    strategy = strategy_config(recipe, row.delay)
    return training_config(recipe, seed, strategy, row.grid.build(lr, row.momentum, row.correction), row.variant)


def strategy_config(recipe: Recipe, delay: Delay) -> dict[str, Any]:
    """Class and arguments of the strategy that delays the gradients."""
    return {"class_path": recipe.strategy, "init_args": copy.deepcopy(dict(delay.init_args))}


def training_config(
    recipe: Recipe,
    seed: int,
    strategy: str | dict[str, Any],
    optimizer: dict[str, Any] | None,
    variant: Variant = BASE,
) -> dict[str, Any]:
    """The base recipe, varied, with a seed, a strategy and an optimizer; ``None`` for the module's own."""
    config = variant.of(recipe.base)
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


def cell_name(recipe: Recipe, row: RowRecipe, lr: float, seed: int) -> str:
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


_PACKAGE = Path(__file__).parents[3]


def own_sources(config: Any) -> dict[str, str]:
    """Digests of the files of the classes that a recipe names, but for installed packages, this one among them.

    These are the file that the class's path names, the one that defines the class, if it is another, and those of its
    base classes. What else those files import is not looked at.

    Args:
        config: a recipe of ``asyncpp fit``, or a part of it.

    Returns:
        Path of a class -> digest of its file.
    """
    found: dict[str, str] = {}
    for class_path in sorted(set(_class_paths(config))):
        found |= _digests(class_path)
    return found


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        class_path = config.get("class_path")
        if isinstance(class_path, str) and "." in class_path:
            yield class_path
    parts = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
    for part in parts:
        yield from _class_paths(part)


@functools.cache  # code that changes while a grid is run does not split it
def _digests(class_path: str) -> dict[str, str]:
    files: dict[Path, str] = {}
    for name, file in _files(class_path):
        files.setdefault(file.resolve(), name)
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for file, name in files.items() if _is_own(file)}


def _files(class_path: str) -> Iterator[tuple[str, Path]]:
    """The files of a class, the one that its path names first; all of them are imported then."""
    try:
        spec = importlib.util.find_spec(class_path.rpartition(".")[0])
    except (ImportError, AttributeError, ValueError):  # the check of the recipe tells
        return
    if spec is None or spec.origin is None or not _is_own(Path(spec.origin).resolve()):
        return
    try:
        found = pkgutil.resolve_name(class_path)
    except Exception:  # the user's code, which the check of the recipe imports, too
        found = None
    yield class_path, Path(spec.origin)
    for part in getattr(found, "__mro__", (found,)):
        with contextlib.suppress(TypeError, OSError):  # not written in Python
            if file := inspect.getsourcefile(part):
                yield f"{part.__module__}.{part.__qualname__}", Path(file)


def _is_own(file: Path) -> bool:
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    if {"site-packages", "dist-packages"} & set(file.parts):
        return False
    return file.is_file() and not any(file.is_relative_to(folder) for folder in (*installed, _PACKAGE))
