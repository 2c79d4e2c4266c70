"""``asyncpp bench time-to-loss``: after how many seconds of training is the loss what it should be?

An asynchronous pipeline makes more updates per second, and each is worth a little less, because a part of its gradient
is one update old. Here both count: the model of a recipe (``recipes/quickstart.yaml``) trains under ``sync_pipeline``
(1F1B with a flush per mini-batch) and under ``async_pipeline``, with the recipe's optimizer (Muon with Error Feedback
there, which feeds back nothing where there is no delay), the same seeds, data, number of updates and schedule of the
learning rate. Each training is an ordinary ``asyncpp fit`` in processes of its own. Seeds run one after the other,
all systems in turn, and the order is turned around from seed to seed. ``--also`` trains further asynchronous pipelines:
PipeDream-2BW (``async+2bw``), or with a slack.

What is measured: seconds of training until the validation loss reaches each target for the first time, interpolated
between two validations; the ratio is taken within a seed. Validations themselves do not count; that they drain the
pipeline does. Without ``--targets``, targets are chosen afterwards among the losses that all runs reached.

What is not: torch's own schedules (see ``asyncpp bench compute`` for their speed against ``sync_pipeline``),
start-up, a tuned learning rate (``--sync-lr`` and ``--async-lr`` set one for each), larger models, longer runs. Where
the cosine ends matters: a run of twice as many updates is at another loss after the same time.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from jsonargparse import ArgumentParser, Namespace

from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.lightning_cli.arguments import recipes_first
from lightning_asyncpp.lightning_cli.recipe_names import recipe_path
from lightning_asyncpp.tools.bench.harness.comparison import machine
from lightning_asyncpp.tools.bench.harness.hosts import wait_for
from lightning_asyncpp.tools.bench.loss_curves import Curve, TargetLine, common_targets, compare
from lightning_asyncpp.tools.bench.names import ASYNC, STALENESS, SYNC, problems_of_systems
from lightning_asyncpp.tools.bench.parsers import TIME_TO_LOSS_EXTRAS, time_to_loss_parser
from lightning_asyncpp.tools.processes import Children, end_of, sigterm_raises
from lightning_asyncpp.tools.text import Spread, aligned, write_json

_CLOCK = "lightning_asyncpp.tools.bench.loss_curves.LossClock"
_SYNC, _ASYNC = "lightning_asyncpp.SyncPipelineStrategy", "lightning_asyncpp.AsyncPipelineStrategy"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = time_to_loss_parser()
    arguments = parser.parse_args(recipes_first(sys.argv[1:] if argv is None else argv))
    recipe = _checked(parser, arguments)
    curves = _measure(arguments, recipe)
    targets = arguments.targets or common_targets([curve for of_seeds in curves.values() for curve in of_seeds])
    lines = compare(curves, targets)
    print(
        f"{arguments.stages} stages, {arguments.micro_batches} micro-batches, {arguments.steps} updates,"
        f" seeds {', '.join(map(str, arguments.seeds))}, {Path(arguments.config).name}"
    )
    print(_table(lines))
    print(_speeds(curves))
    if arguments.json:
        content = {"settings": _plain(arguments), "machine": machine(), "curves": curves}
        write_json(arguments.json, {**content, "targets": [asdict(line) for line in lines]})


def _checked(parser: ArgumentParser, arguments: Namespace) -> dict[str, Any]:
    """The recipe, or the end with all problems."""
    shape = {name: arguments[name] for name in ("micro_batches", "lookahead", "staleness", "slack")}
    _, problems = PipelineSettings.chosen(1, **shape).resolve(arguments.stages)
    problems += problems_of_systems(arguments.also, TIME_TO_LOSS_EXTRAS, "--also")
    if arguments.stages < 2:
        problems.append(f"--stages {arguments.stages}: a pipeline to compare has at least 2 stages")
    if len(set(arguments.seeds)) < len(arguments.seeds):
        problems.append("--seeds: each counts once")
    if arguments.steps // arguments.validate_every < 2:
        problems.append("--steps: at least two validations are needed; lower --validate-every")
    recipe: dict[str, Any] = {}
    try:
        arguments.config = recipe_path(arguments.config)
        recipe = yaml.safe_load(Path(arguments.config).read_text(encoding="utf-8"))
        if None not in (arguments.sync_lr, arguments.async_lr):
            _set_learning_rate(copy.deepcopy(recipe), 1.0)
    except (OSError, yaml.YAMLError, ValueError, KeyError) as error:
        problems.append(f"--config: {error}")
    if problems:
        parser.error("; ".join(problems))
    return recipe


def _measure(arguments: Namespace, recipe: Mapping[str, Any]) -> dict[str, list[Curve]]:
    systems = [SYNC, ASYNC, *arguments.also]
    curves: dict[str, list[Curve]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="asyncpp-bench-") as name, sigterm_raises():
        for number, seed in enumerate(arguments.seeds):
            for system in systems if number % 2 == 0 else reversed(systems):
                curve = _train(recipe_of(recipe, system, seed, arguments), Path(name), arguments.timeout)
                curves[system].append(curve)
                print(
                    f"seed {seed}, {system}: loss {curve[-1][2]:.4f} after {curve[-1][1]:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return curves


def recipe_of(recipe: Mapping[str, Any], system: str, seed: int, arguments: Namespace) -> dict[str, Any]:
    """The recipe of one training: the same for both systems but for the strategy (and the learning rate, if given)."""
    own = copy.deepcopy(dict(recipe))
    strategy: dict[str, Any] = {"micro_batches": arguments.micro_batches}
    if system == ASYNC:
        strategy |= {name: arguments[name] for name in ("lookahead", "staleness", "slack")}
    elif system != SYNC:
        strategy |= {"lookahead": arguments.lookahead, **STALENESS[system]}
    own["seed_everything"] = seed
    own["trainer"] = {
        **own.get("trainer", {}),
        "accelerator": "cpu",
        "devices": arguments.stages,
        "strategy": {"class_path": _SYNC if system == SYNC else _ASYNC, "init_args": strategy},
        "max_steps": arguments.steps,
        "val_check_interval": arguments.validate_every,
        "check_val_every_n_epoch": None,
        "limit_val_batches": arguments.val_batches,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [],
    }
    rate = arguments.sync_lr if system == SYNC else arguments.async_lr
    if rate is not None:
        _set_learning_rate(own, rate)
    return own


def _set_learning_rate(recipe: dict[str, Any], rate: float) -> None:
    """Set it in the recipe's optimizer, inside of a correction such as Error Feedback."""
    optimizer = recipe["model"]["init_args"]["optimizer"]
    while "base" in optimizer["init_args"]:
        optimizer = optimizer["init_args"]["base"]
    optimizer["init_args"]["lr"] = rate


def _train(recipe: dict[str, Any], folder: Path, timeout: float) -> Curve:
    file = folder / "curve.json"
    file.unlink(missing_ok=True)
    recipe["trainer"]["callbacks"] = [{"class_path": _CLOCK, "init_args": {"file": str(file)}}]
    recipe["trainer"]["default_root_dir"] = str(folder)
    plain = json.loads(json.dumps(recipe))  # the parser's integers are of types of its own
    (folder / "fit.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    with Children(folder) as children:
        command = [sys.executable, "-m", "lightning_asyncpp", "fit", "--config", str(folder / "fit.yaml")]
        children.start("training", command, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        wait_for(children, timeout, lambda failed: f"a training failed:\n{end_of(children.log(failed))}")
    return [tuple(point) for point in json.loads(file.read_text())]


def _table(lines: Sequence[TargetLine]) -> str:
    rows = [["validation loss", "system", "s", "updates", "sync / it"]]
    for line in lines:
        for system, seconds in line.seconds.items():
            speed_up = _cell(line.speed_up[system], 2) if system in line.speed_up else ""
            rows.append([f"{line.loss:.2f}", system, _cell(seconds, 1), _cell(line.steps[system], 0), speed_up])
    return aligned(rows)


def _cell(spread: Spread | None, digits: int) -> str:
    return "not by all" if spread is None else spread.format(digits)


def _speeds(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Time per update and last loss of each."""
    texts = []
    for system, of_seeds in curves.items():
        pace = Spread.of([curve[-1][1] / curve[-1][0] * 1e3 for curve in of_seeds])
        last = Spread.of([curve[-1][2] for curve in of_seeds])
        texts.append(f"{system}: {pace.format(1)} ms per update, last loss {last.format(4)}")
    return "\n".join(texts)


def _plain(arguments: Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "json"}
