"""``asyncpp fit`` and the other subcommands of LightningCLI, on YAML recipes; and recipes read for the tools."""

from __future__ import annotations

import logging
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

import lightning_asyncpp.optim  # noqa: F401  (finds optimizers by their short names)
from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.dependencies import required
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import find_own_modules, written_out
from lightning_asyncpp.lightning_cli.messages import is_raised_by, say, say_what_is_logged
from lightning_asyncpp.lightning_cli.recipe_parser import RecipeParser
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.callbacks.terminal import PipelineProgressBar
from lightning_asyncpp.trainer.set_up import trainer_problems


def check_start(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
    """Refuse what every process that is to be started would refuse, with all that is wrong.

    Raises:
        ConfigurationError: the data are not there, or strategy, number of devices and layers do not fit together.
    """
    problems = []
    if isinstance(data, TextDataModule):
        try:
            data.check_source()
        except DataError as error:
            problems.append(str(error))
    if isinstance(strategy := trainer.strategy, PipelineStrategy):
        settings, world_size = strategy.session.settings, trainer.num_nodes * trainer.num_devices
        problems += trainer_problems(trainer, settings.weight_dtype)
        problems += settings.resolve(world_size)[1]
    if problems:
        raise ConfigurationError.from_problems(problems)


def processes_of(trainer: L.Trainer) -> str:
    """How many processes a Trainer runs on, and under which strategy."""
    count, kind = trainer.num_nodes * trainer.num_devices, type(trainer.strategy).__name__
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    return f"{count} {'process' if count == 1 else 'processes'} ({kind}, {device})"


class AsyncppCLI(LightningCLI):
    """LightningCLI that says what is wrong with a recipe, and ends a training with a line on what to look at next."""

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make the parser, of the subcommand alone that is asked for: describing all takes four times as long."""
        asked = {name: skipped for name, skipped in self.subcommands().items() if [name] == sys.argv[1:2]}
        if asked:
            self.subcommands = lambda: asked  # type: ignore[method-assign]
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the arguments, recipes and overrides."""
        required(LightningCLI, "_parse_ckpt_path", "take the model from the recipe, and not from a checkpoint")
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Leave the model to recipe and command line: Lightning would import and call what a checkpoint names."""

    def before_instantiate_classes(self) -> None:
        """Keep what classes raise: where a key takes several types, jsonargparse tells of another one that it tried."""
        self._raised: list[Exception] = []
        self.parser.add_instantiator(self._instantiated, object)

    def _instantiated(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return class_type(*args, **kwargs)
        except Exception as error:
            self._raised.append(error)
            raise

    def instantiate_classes(self) -> None:
        """Make what the recipe asks for.

        Raises:
            ConfigurationError: a class of this package refused its arguments.
            Exception: what another class raised, without jsonargparse's account of all that it tried.
        """
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            cause = self._raised[-1] if self._raised else _first_cause(error)
            raise (ConfigurationError(str(cause)) if is_raised_by(cause) else cause) from None
        if self.subcommand is not None:
            check_start(self.trainer, self.model, self.datamodule)
            say(f"{self.subcommand}: starting {processes_of(self.trainer)}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer, with a progress bar that fits a terminal where the recipe names none.

        Raises:
            ConfigurationError: Lightning refused its arguments, as where there are not as many devices.
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
        """Name the checkpoint and the logs."""
        callback = self.trainer.checkpoint_callback
        checkpoint = getattr(callback, "best_model_path", "") or ("none yet" if callback else "none was configured")
        logs = next((x for x in self.trainer.loggers if isinstance(x, TensorBoardLogger)), None)
        look = f"`tensorboard --logdir {logs.root_dir}` shows the curves" if logs is not None else "no TensorBoard logs"
        _print(f"Done. Checkpoint: {checkpoint}; {look}.")


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def run() -> None:
    """Run the subcommand that the arguments of the process name.

    Raises:
        ConfigurationError: what was asked for does not fit together.
        SystemExit: it cannot even be read.
    """
    say_what_is_logged()
    sys.argv[1:] = written_out(sys.argv[1:])
    try:
        make_cli(save_config_kwargs={"overwrite": True})
    except DataError as error:  # as it is prepared
        raise ConfigurationError(str(error)) from error


def read_configuration(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a subcommand as the command does, recipes and overrides; nothing is built.

    Args:
        arguments: what would follow ``asyncpp``: ``["fit", "recipe.yaml", "--trainer.max_steps", "7"]``.

    Returns:
        The whole configuration of the subcommand, defaults filled in, in plain values.

    Raises:
        SystemExit: something is wrong with them; what, stands on the standard error output.
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


class _Read(Exception):  # noqa: N818  (no error: everything was read)
    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__()
        self.configuration = configuration


class _Reader(AsyncppCLI):
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        raise _Read(self.config[self.config["subcommand"]].as_dict())


def make_cli(cli: type[AsyncppCLI] = AsyncppCLI, **how: Any) -> AsyncppCLI:
    """Read a recipe and what overrides it, and do what it asks for.

    Args:
        cli: what reads and does it.
        **how: further arguments of ``LightningCLI``: with ``run=False`` it makes module, data and Trainer alone.
    """
    _quiet()
    # They are in the sources, whose reading takes a third of the time that a recipe's does.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=_shows_docstrings(sys.argv[1:]))
    return cli(
        LightningModule,
        subclass_mode_model=True,
        # Each stage builds its own optimizer, after the cut and with the parameters' names.
        auto_configure_optimizers=False,
        parser_kwargs={"description": "Asynchronous pipeline parallelism for PyTorch Lightning.", "prog": "asyncpp"},
        parser_class=RecipeParser,
        **how,
    )


def _shows_docstrings(arguments: Sequence[str]) -> bool:
    """Whether a help screen or a recipe with comments may be asked for."""
    return any("help" in argument or "print_config" in argument or argument == "-h" for argument in arguments)


def _quiet() -> None:
    # Remarks of Lightning on its own internals and on loaders that are as they should be.
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
    """Whether Lightning says something of this run, and not of a package that could be installed."""
    return not record.getMessage().startswith("💡 Tip: ")


@rank_zero_only
def _print(text: Any) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # which may not have the bytes of a path
    print(str(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)
