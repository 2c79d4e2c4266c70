"""``asyncpp fit`` and the other subcommands of LightningCLI, and the reading of recipes for the tools."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jsonargparse
import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_asyncpp.optim  # noqa: F401  (makes the optimizers known by their short names)
from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.dependencies import required
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import find_own_modules, written_out
from lightning_asyncpp.lightning_cli.messages import is_raised_by, say, say_what_is_logged
from lightning_asyncpp.lightning_cli.recipe_parser import RecipeParser
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.callbacks.terminal import PipelineProgressBar
from lightning_asyncpp.trainer.set_up import trainer_problems

_FILE = re.compile(r"(?!(best|last|hpc|registry.*)$)(?!.*://).*")  # not a URL or one of Lightning's keywords


def check_start(trainer: L.Trainer, data: L.LightningDataModule | None, ckpt_path: str | None) -> None:
    """Raise the errors that every process would raise, before processes start.

    Raises:
        ConfigurationError: data or checkpoint is missing, or strategy, Trainer and number of devices do not fit
            together; the message has all problems.
    """
    problems = []
    if isinstance(data, TextDataModule):
        try:
            data.check_source()
        except DataError as error:
            problems.append(str(error))
    if ckpt_path == "best":
        problems.append("--ckpt_path best: only the process that trained knows the best checkpoint; give its path")
    if ckpt_path is not None and _FILE.fullmatch(ckpt_path) and not os.path.lexists(ckpt_path):
        problems.append(f"--ckpt_path {ckpt_path}: there is no such file or folder")
    if isinstance(strategy := trainer.strategy, PipelineStrategy):
        settings, world_size = strategy.session.settings, trainer.num_nodes * trainer.num_devices
        problems += trainer_problems(trainer, settings.weight_dtype)
        problems += settings.resolve(world_size)[1]
    if problems:
        raise ConfigurationError.from_problems(problems)


class AsyncppCLI(LightningCLI):
    """LightningCLI with short error messages for recipes, and a final line about the checkpoint and the logs."""

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make only the requested subcommand's parser; making those of all would take four times as long."""
        asked = {name: skipped for name, skipped in self.subcommands().items() if [name] == sys.argv[1:2]}
        if asked:
            self.subcommands = lambda: asked  # type: ignore[method-assign]
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the arguments, recipes and overrides."""
        required(LightningCLI, "_parse_ckpt_path", "take the model from the recipe, and not from a checkpoint")
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Do nothing. Lightning would read the model's class from a checkpoint, and import any class named there."""

    def before_instantiate_classes(self) -> None:
        """Keep the errors that classes raise; if a key has several types, jsonargparse may report another error."""
        self._raised: list[Exception] = []
        self.parser.add_instantiator(self._instantiated, object)

    def _instantiated(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return class_type(*args, **kwargs)
        except Exception as error:
            self._raised.append(error)
            raise

    def instantiate_classes(self) -> None:
        """Make the objects of the recipe.

        Raises:
            ConfigurationError: a class of this package or the Trainer refused its arguments, or the run cannot start.
            Exception: error that another package's class raised, without jsonargparse's report of all types that it
                tried.
        """
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            cause = self._raised[-1] if self._raised else _first_cause(error)
            raise (ConfigurationError(str(cause)) if is_raised_by(cause) else cause) from None
        if self.subcommand is not None:
            check_start(self.trainer, self.datamodule, self.config_init[self.subcommand].get("ckpt_path"))
            count, kind = self.trainer.num_nodes * self.trainer.num_devices, type(self.trainer.strategy).__name__
            device = type(self.trainer.accelerator).__name__.removesuffix("Accelerator")
            processes = f"{count} {'process' if count == 1 else 'processes'}"
            say(f"{self.subcommand}: starting {processes} ({kind}, {device})")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer, with this package's progress bar unless the recipe names or disables one.

        Raises:
            ConfigurationError: Lightning refused the arguments, for instance for lack of devices.
        """
        section = self.config_init[self.subcommand]["trainer"] if self.subcommand else self.config_init["trainer"]
        given = section["callbacks"]
        callbacks = given if isinstance(given, list) else [] if given is None else [given]
        if section["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            kwargs["callbacks"] = [*callbacks, PipelineProgressBar()]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            if not is_raised_by(error, "lightning."):
                raise
            raise ConfigurationError(f"the Trainer refuses its arguments: {error}") from None

    def after_fit(self) -> None:
        """Print the paths of the checkpoint and the logs."""
        callback = self.trainer.checkpoint_callback
        paths = [getattr(callback, name, "") for name in ("best_model_path", "last_model_path")]
        checkpoint = next(filter(None, paths), "none was written" if callback else "none was configured")
        logs = next((x for x in self.trainer.loggers if isinstance(x, TensorBoardLogger)), None)
        look = f"`tensorboard --logdir {logs.root_dir}` shows the curves" if logs is not None else "no TensorBoard logs"
        _print(f"Done. Checkpoint: {checkpoint}; {look}.")


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def run() -> None:
    """Run the subcommand given in this process's arguments.

    Raises:
        ConfigurationError: the arguments do not fit together.
        SystemExit: the arguments cannot be parsed.
    """
    say_what_is_logged()
    sys.argv[1:] = written_out(sys.argv[1:])
    try:
        make_cli(save_config_kwargs={"overwrite": True})
    except DataError as error:  # raised while data is prepared
        raise ConfigurationError(str(error)) from error


def read_configuration(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a subcommand, recipes and overrides, as the command does, without making objects.

    Args:
        arguments: arguments after ``asyncpp``: ``["fit", "recipe.yaml", "--trainer.max_steps", "7"]``.

    Returns:
        The whole configuration of the subcommand, with defaults, in plain values.

    Raises:
        ConfigurationError: an argument names a recipe that does not exist.
        SystemExit: the arguments are wrong; the message is on the standard error output.
    """
    before = list(sys.argv)
    sys.argv = ["asyncpp", *written_out(arguments)]
    find_own_modules()
    try:
        make_cli(_Reader)
    except _Read as read:
        return read.configuration
    finally:
        sys.argv = before
    raise RuntimeError("LightningCLI read its arguments without calling parse_arguments")


class _Read(Exception):  # noqa: N818  (not an error: it ends the reading)
    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__()
        self.configuration = configuration


class _Reader(AsyncppCLI):
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        raise _Read(self.config[self.config["subcommand"]].as_dict())


def make_cli(cli: type[AsyncppCLI] = AsyncppCLI, **how: Any) -> AsyncppCLI:
    """Read a recipe and its overrides, and run the subcommand.

    Args:
        cli: class that reads and runs the subcommand.
        **how: further arguments of ``LightningCLI``; with ``run=False`` it only makes module, data and Trainer.
    """
    _quiet()
    # Only help and commented recipes need the docstrings of attributes; with them, parsing takes a third longer.
    shows = any("help" in argument or "print_config" in argument or argument == "-h" for argument in sys.argv[1:])
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=shows)
    return cli(
        LightningModule,
        subclass_mode_model=True,
        # The modules of this package build the optimizer themselves, with the parameters' names.
        auto_configure_optimizers=False,
        parser_kwargs={"description": "Asynchronous pipeline parallelism for PyTorch Lightning.", "prog": "asyncpp"},
        parser_class=RecipeParser,
        **how,
    )


def _quiet() -> None:
    # Suppress warnings about Lightning's own internals, correct loaders and folders with earlier checkpoints, and tips.
    for message in (
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*does not have many workers.*",
        ".*`IterableDataset` has `__len__` defined.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    for module in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(module).addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Return whether a record of Lightning is about this run and not a tip to install a package."""
    return not record.getMessage().startswith("💡 Tip: ")


@rank_zero_only
def _print(text: Any) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # may not be able to encode a path
    print(str(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)
