"""Seconds of training until the validation loss reaches a target."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from research.benchmarks.options import parse_options
from research.benchmarks.report import Spread, describe_machine, print_table
from research.benchmarks.systems import STRATEGIES

ROOT = Path(__file__).parents[2]
_SYNC, _ASYNC = "lightning_asyncpp.SyncPipelineStrategy", "lightning_asyncpp.AsyncPipelineStrategy"
Curve: TypeAlias = Sequence[tuple[int, float, float]]
"""Validations of a run in their order: step, seconds of training, loss."""


@dataclass(frozen=True)
class TimeToLoss:
    """A recipe's model under sync_pipeline and async_pipeline: more updates per second, each worth a little less.

    Both have the recipe's optimizer and learning rate, the same seeds, data and number of updates; each training is an
    ordinary `asyncpp fit`. Systems take turns, and the order turns round from seed to seed. Seconds are those of
    training, interpolated between two validations, whose time does not count (that they drain the pipeline does);
    ratios are taken within a seed. Not measured: start-up, tuned learning rates, torch's schedules.

    Attributes:
        config: recipe of `asyncpp fit`.
        ahead: by how many steps the optimizer looks ahead, in place of the recipe's correction; None: as the recipe.
        systems: besides sync; the strategies of the other benchmarks, with their arguments alone.
        targets: losses; 0: found among those that all runs reached.
        json: file for the curves.
    """

    config: str = str(ROOT / "recipes" / "quickstart.yaml")
    stages: int = 2
    microbatches: int = 4
    ahead: float | None = field(default=None, metadata={"type": float})
    systems: tuple[str, ...] = ("async",)
    steps: int = 300
    validate_every: int = 25
    val_batches: int = 24
    seeds: tuple[int, ...] = (0, 1, 2)
    targets: tuple[float, ...] = (0.0,)
    json: str = ""


class LossClock(Callback):
    """Writes the curve of ``val_loss`` at the end of the training; the clock stands still while validations run."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.curve: list[tuple[int, float, float]] = []
        self._started = self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note time and loss, and go on."""
        if trainer.sanity_checking:
            return
        seconds = self._paused - self._started
        self.curve.append((trainer.global_step, seconds, float(trainer.callback_metrics["val_loss"])))
        self._started += time.perf_counter() - self._paused

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the curve."""
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(self.curve))


class Reached(NamedTuple):
    """When a run reached a target: updates, and seconds of training."""

    steps: float
    seconds: float


def reach(curve: Curve, target: float) -> Reached | None:
    """Return when the loss first was ``target`` or less, or None."""
    if curve[0][2] <= target:
        return Reached(*curve[0][:2])
    for (step, seconds, loss), (next_step, next_seconds, next_loss) in pairwise(curve):
        if next_loss <= target < loss:
            share = (loss - target) / (loss - next_loss)
            return Reached(step + share * (next_step - step), seconds + share * (next_seconds - seconds))
    return None


def common_targets(curves: Sequence[Curve], count: int = 4) -> list[float]:
    """Return losses that all runs reached, evenly from a quarter of the steps to the worst run's best, rounded."""
    lowest = max(min(loss for _, _, loss in curve) for curve in curves)
    highest = max(curve[len(curve) // 4][2] for curve in curves)
    spread = [highest + (lowest - highest) * index / (count - 1) for index in range(count)]
    return sorted({math.ceil(loss * 100 - 1e-9) / 100 for loss in spread}, reverse=True)


def overrides(options: TimeToLoss, system: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return what a training overrides in the recipe: the same for all systems but for the strategy."""
    if system not in STRATEGIES:
        raise ValueError(f"--systems {system}: there is no such system. Choose from {', '.join(STRATEGIES)}.")
    arguments: dict[str, Any] = {"microbatches": options.microbatches, **STRATEGIES[system]}
    clock = {"class_path": f"{__name__}.LossClock", "init_args": {"file": str(folder / "curve.json")}}
    trainer = {
        "accelerator": "cpu", "devices": options.stages, "max_steps": options.steps, "default_root_dir": str(folder),
        "strategy": {"class_path": _SYNC if system == "sync" else _ASYNC, "init_args": arguments},
        "val_check_interval": options.validate_every, "check_val_every_n_epoch": None,
        "limit_val_batches": options.val_batches, "num_sanity_val_steps": 0, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "callbacks": [clock],
    }  # fmt: skip
    return {"seed_everything": seed, "trainer": trainer}


def looking_ahead(optimizer: Mapping[str, Any], ahead: float) -> dict[str, Any]:
    """The optimizer of a recipe with another correction: weight prediction, ``ahead`` steps beyond the delay."""
    base = optimizer["init_args"]["base"]
    return {"class_path": "lightning_asyncpp.optim.WeightPrediction", "init_args": {"ahead": ahead, "base": base}}


def train(options: TimeToLoss, system: str, seed: int) -> Curve:
    """Train once, in new processes."""
    with tempfile.TemporaryDirectory() as name:
        own = Path(name, "own.yaml")
        recipe = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
        settings = overrides(options, system, seed, Path(name))
        if options.ahead is not None:
            model = recipe["model"]["init_args"]
            model["optimizer"] = looking_ahead(model["optimizer"], options.ahead)
        settings["trainer"] = {**recipe.get("trainer", {}), **settings["trainer"]}
        own.write_text(yaml.safe_dump({**recipe, **settings}))
        command = [sys.executable, "-m", "lightning_asyncpp", "fit", "--config", str(own)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=sys.stderr)
        curve = [tuple(point) for point in json.loads(Path(name, "curve.json").read_text())]
    print(f"seed {seed}, {system}: loss {curve[-1][2]:.4f} after {curve[-1][1]:.1f} s", file=sys.stderr, flush=True)
    return curve


def main(argv: Sequence[str]) -> None:
    """Train, and print the table."""
    options = parse_options(TimeToLoss, "time-to-loss", argv)
    systems = ("sync", *options.systems)
    curves: dict[str, list[Curve]] = {system: [] for system in systems}
    for number, seed in enumerate(options.seeds):
        for system in systems if number % 2 == 0 else reversed(systems):
            curves[system].append(train(options, system, seed))
    targets = options.targets if any(options.targets) else common_targets([c for some in curves.values() for c in some])
    print_table(["validation loss", "system", "s", "updates", "sync / it"], table(curves, targets))
    paces = {system: [curve[-1][1] / curve[-1][0] * 1e3 for curve in of_seeds] for system, of_seeds in curves.items()}
    for system, of_seeds in curves.items():
        gain = Spread.of([sync / own for sync, own in zip(paces["sync"], paces[system], strict=True)])
        pace, last = Spread.of(paces[system]), Spread.of([curve[-1][2] for curve in of_seeds])
        print(f"{system}: {pace.text(1)} ms per update, sync / it {gain.text(2)}, last loss {last.text(4)}")
    print(describe_machine())
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": describe_machine(), "curves": curves}))


def table(curves: Mapping[str, Sequence[Curve]], targets: Sequence[float]) -> list[list[str]]:
    """A row for each target and system; ``not by all`` where a run never got there."""
    rows = []
    for target in targets:
        reached = {system: [reach(curve, target) for curve in of_seeds] for system, of_seeds in curves.items()}
        for system, runs in reached.items():
            known = [run for run in runs if run]
            row = [f"{target:.2f}", system, "not by all", "", ""]
            if len(known) == len(runs):
                row[2] = Spread.of([run.seconds for run in known]).text(1)
                row[3] = Spread.of([run.steps for run in known]).text(0)
                pairs = [(sync, own) for sync, own in zip(reached["sync"], known, strict=True) if sync]
                if system != "sync" and len(pairs) == len(runs):
                    row[4] = Spread.of([sync.seconds / own.seconds for sync, own in pairs]).text(2)
            rows.append(row)
    return rows
