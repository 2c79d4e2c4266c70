"""``asyncpp check RECIPE``: test that a pipeline trains a recipe's model as a single process does."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.cli import LightningCLI

from lightning_asyncpp.lightning_cli.arguments import written_out
from lightning_asyncpp.lightning_cli.command import make_cli
from lightning_asyncpp.tools.check.model_check import batches_of, check_model
from lightning_asyncpp.tools.parsers import check_parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report of ``check_model``; exit with code 1 unless it is ok."""
    own, rest = check_parser().parse_known_args(argv)
    sys.argv[1:] = written_out(["check", *rest])[1:]
    cli = make_cli(run=False, save_config_callback=None)
    report = check_model(cli.model, _batches(cli), **_shape(cli, own), updates=own.updates)
    print(report)
    if not report.ok:
        raise SystemExit(1)


def _shape(cli: LightningCLI, own: Namespace) -> dict[str, Any]:
    """Return the arguments of ``check_model``: options of the command line, and the recipe's values for the rest."""
    trainer = cli.trainer
    settings = getattr(getattr(trainer.strategy, "session", None), "settings", None)
    replicas = getattr(settings, "data_parallel_size", 1)
    stages = own.stages or max(2, trainer.num_nodes * trainer.num_devices // replicas)
    partition = getattr(settings, "partition", "auto")
    if not isinstance(partition, str) and len(partition) != stages:
        partition = "auto"  # the recipe's partition is for another number of stages
    microbatches = own.microbatches or getattr(settings, "microbatches", None)
    given = {"stages": stages, "microbatches": microbatches, "partition": partition, "seed": own.seed}
    of_pipeline = ("delay", "staleness", "slack", "lookahead") if settings is not None else ()
    of_trainer = ("gradient_clip_val", "gradient_clip_algorithm", "precision", "accumulate_grad_batches")
    given |= {name: getattr(settings, name) for name in of_pipeline}
    return given | {name: getattr(trainer, name) for name in of_trainer}


def _batches(cli: LightningCLI) -> Iterator[Any]:
    """Return the recipe's training batches."""
    data: Any = copy.deepcopy(cli.model) if cli.datamodule is None else cli.datamodule
    data.trainer = cli.trainer
    return batches_of(data)
