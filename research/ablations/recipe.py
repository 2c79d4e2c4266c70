"""The recipe of an ablation: a grid of optimizers, delays and corrections around one recipe of ``asyncpp fit``."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from research.ablations.rows import UNCORRECTED, Key, Row, Setting

Config = dict[str, Any]
RESULT = "result.json"
"""What a training leaves in its folder."""
_STRATEGY = "lightning_asyncpp.DelayedGradientStrategy"


@dataclass(frozen=True)
class Arm:
    """A row of the grid, and how it is trained.

    Attributes:
        row: its names.
        optimizer: entry of the recipe's ``optimizers``.
        correction: entry of ``corrections``; None for the optimizer alone.
        delay: arguments of ``DelayedGradientStrategy``.
        places: what its variant changes in the base recipe.
    """

    row: Row
    optimizer: Mapping[str, Any]
    correction: Mapping[str, Any] | None
    delay: Mapping[str, Any]
    places: Mapping[str, Any]

    @property
    def lrs(self) -> list[float]:
        """Return the learning rates to try."""
        return [float(lr) for lr in self.optimizer["lr"]]

    @property
    def same_lr(self) -> bool:
        """Whether it takes the learning rate of the uncorrected row instead of searching its own."""
        return self.correction is not None and self.correction.get("lr") == "same"

    def optimizer_config(self, lr: float) -> Config:
        """Return class and arguments of the optimizer, within its correction if there is one."""
        arguments = copy.deepcopy(dict(self.optimizer.get("init_args", {})))
        places = self.optimizer.get("lr_argument", "lr")
        for place in [places] if isinstance(places, str) else places:
            set_at(arguments, place, lr)
        if self.row.momentum is not None:
            set_at(arguments, self.optimizer["momentum"]["argument"], self.row.momentum)
        config = {"class_path": self.optimizer["class_path"], "init_args": arguments}
        if self.correction is None:
            return config
        wrapper = {**self.correction.get("init_args", {}), "base": config}
        return {"class_path": self.correction["class_path"], "init_args": wrapper}


@dataclass(frozen=True)
class Recipe:
    """A grid of trainings: the folder of its file, and the keys of the file, which README.md explains."""

    folder: Path
    name: str
    recipe: str
    optimizers: Mapping[str, Mapping[str, Any]]
    delays: Sequence[int | Mapping[str, Any]] = (0, 1)
    corrections: Mapping[str, Mapping[str, Any] | None] = field(default_factory=lambda: {UNCORRECTED: None})
    variants: Mapping[str | None, Mapping[str, Any]] = field(default_factory=dict)
    seeds: Sequence[int] = (1,)
    lr_extensions: int = 3
    seed_arguments: Sequence[str] = ("data.init_args.seed",)
    metric: str = "val_loss"
    diverged_above: float | None = None
    published: Sequence[str] = ()
    delay_argument: str | None = None

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a file."""
        return cls(folder=path.parent, **yaml.safe_load(path.read_text(encoding="utf-8")))

    def base(self) -> Config:
        """Return the recipe of ``asyncpp fit`` that every training varies."""
        base: Config = yaml.safe_load((self.folder / self.recipe).read_text(encoding="utf-8"))
        return base

    def arms(self) -> Iterator[Arm]:
        """Yield all rows; at delay 0, where there is nothing to correct, the optimizer runs alone."""
        for name, optimizer in self.optimizers.items():
            for momentum in optimizer.get("momentum", {"values": [None]})["values"]:
                for variant in self.variants or [None]:
                    for delay in self.delays:
                        arguments = {"delay": delay} if isinstance(delay, int) else delay
                        setting = setting_of(arguments)
                        corrections = optimizer.get("corrections", self.corrections)
                        for correction in corrections if setting[0] != "0" else [UNCORRECTED]:
                            row = Row(name, momentum, variant, *setting, correction)
                            places = self.variants.get(variant, {})
                            yield Arm(row, optimizer, corrections.get(correction), arguments, places)

    def config(self, arm: Arm, lr: float, seed: int) -> Config:
        """Return all that decides the result of a training, as a recipe of ``asyncpp fit``."""
        config = self.base()
        if self.delay_argument is not None:
            set_at(config, self.delay_argument, dict(arm.delay))
        for place, value in arm.places.items():
            set_at(config, place, copy.deepcopy(value))
        config["seed_everything"] = seed
        for place in self.seed_arguments:
            set_at(config, place, seed)
        trainer = config.setdefault("trainer", {})
        for key in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"):
            trainer[key] = False
        trainer["devices"] = 1
        if self.delay_argument is None:
            trainer["strategy"] = {"class_path": _STRATEGY, "init_args": dict(arm.delay)}
        set_at(config, "model.init_args.optimizer", arm.optimizer_config(lr))
        return config

    def cell_name(self, arm: Arm, key: Key) -> str:
        """Return the name of a training's folder: readable, with a hash of everything that decides the result."""
        content = [self.config(arm, key.lr, key.seed), self.metric, self.diverged_above]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
        return f"{key.row.name}_lr{key.lr:g}_seed{key.seed}_{digest}"

    def write_cell(self, folder: Path, arm: Arm, key: Key, accelerator: str) -> None:
        """Write ``fit.yaml``, with which ``asyncpp fit`` runs a training that leaves its result in the folder."""
        config = self.config(arm, key.lr, key.seed)
        recorder = {"folder": str(folder), "metric": self.metric, "diverged_above": self.diverged_above}
        config["trainer"] |= {
            "accelerator": accelerator,
            "default_root_dir": str(folder),
            "callbacks": [{"class_path": "research.ablations.training.Recorder", "init_args": recorder}],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fit.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def setting_of(arguments: Mapping[str, Any]) -> Setting:
    """Return delay and stages as in the tables: ``("least microbatches=8", 4)`` of ``{stages: 4, microbatches: 8}``."""
    stages = arguments.get("stages")
    uniform = stages is None or arguments.get("staleness") == "uniform"
    kind = str(arguments.get("delay", 1)) if uniform else "least"
    more = [f"{k}={v}" for k, v in sorted(arguments.items()) if k not in ("delay", "stages", "staleness")]
    return " ".join([kind, *more]), stages


def set_at(content: Any, place: str, value: Any) -> None:
    """Set a value in nested mappings and lists, at a place such as ``trainer.max_steps`` or ``betas.0``."""
    *path, last = (int(key) if key.isdecimal() else key for key in place.split("."))
    for key in path:
        content = content.setdefault(key, {}) if isinstance(content, dict) else content[key]
    content[last] = value
