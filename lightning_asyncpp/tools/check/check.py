"""``asyncpp check RECIPE``: would a pipeline train this recipe's model as a single process does?"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import CombinedLoader

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import recipes_first, written_out
from lightning_asyncpp.lightning_cli.command import make_cli
from lightning_asyncpp.tools.check.model_check import check_model
from lightning_asyncpp.tools.parsers import check_parser

_NOT_ALL_COMPARED = 3  # 2 is that of wrong arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Print how the model is cut and how near the results are.

    What is to be mended ends with code 1; where nothing is, but something could not be compared, with code 3.
    """
    parser = check_parser()
    own, rest = parser.parse_known_args(recipes_first(sys.argv[1:] if argv is None else argv))
    sys.argv[1:] = written_out(rest)
    cli = make_cli(prog=parser.prog, own_options=parser.option_names, run=False, save_config_callback=None)
    try:
        report = check_model(cli.model, _batches(cli, own.updates), **_shape(cli, own), seed=own.seed)
    except ConfigurationError as error:
        print(f"asyncpp check: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(report)
    if not report.ok:
        raise SystemExit(1 if report.findings else _NOT_ALL_COMPARED)


def _shape(cli: LightningCLI, own: Namespace) -> dict[str, Any]:
    """The recipe's pipeline, with the numbers of stages and micro-batches that were given instead."""
    trainer = cli.trainer
    settings = getattr(getattr(trainer.strategy, "session", None), "settings", None)
    stages, micro_batches = own.stages, own.micro_batches
    if stages is None:
        replicas = getattr(settings, "data_parallel_size", 1)
        stages = max(2, trainer.num_nodes * trainer.num_devices // replicas)
    if micro_batches is None and (given := getattr(settings, "micro_batches", None)):
        micro_batches = max(given, stages)
    delay = getattr(settings, "delay", 1)
    staleness, slack = getattr(settings, "staleness", None), getattr(settings, "slack", 0)
    lookahead = getattr(settings, "lookahead", None)
    partition = getattr(settings, "partition", "auto")
    if not isinstance(partition, str) and len(partition) != stages:
        partition = "auto"  # the recipe's is for another number of stages
    shape = {"stages": stages, "micro_batches": micro_batches, "updates": own.updates, "delay": delay}
    return {**shape, "lookahead": lookahead, "staleness": staleness, "slack": slack, "partition": partition}


def _batches(cli: LightningCLI, count: int) -> list[Any]:
    """The first batches of the recipe's data."""
    data: Any = cli.datamodule
    data.prepare_data()
    data.setup("fit")
    loaders = data.train_dataloader()
    # Several loaders at once are read as the Trainer reads them.
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    return [batch for batch, _, _ in itertools.islice(combined, max(count, 1))]
