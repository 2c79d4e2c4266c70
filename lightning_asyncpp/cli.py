"""The ``asyncpp`` command: Lightning's subcommands on YAML recipes, and the tools."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonargparse
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_asyncpp.optim  # noqa: F401  (registers the strategies; finds optimizers by their short names)
from lightning_asyncpp.pipeline.errors import ConfigurationError, PeerLostError
from lightning_asyncpp.private_names import required
from lightning_asyncpp.recipe_parser import RecipeParser
from lightning_asyncpp.resumed_model import another_model, differences, model_arguments, saved_hyper_parameters
from lightning_asyncpp.yaml_limits import limit_yaml

# subcommand -> the module whose main(arguments) runs it
TOOLS = {
    "ablate": "lightning_asyncpp.tools.ablation.ablate",
    "bench": "lightning_asyncpp.tools.bench.command",
    "check": "lightning_asyncpp.tools.check.command",
    "checkpoint": "lightning_asyncpp.tools.checkpoint.checkpoint",
    "doctor": "lightning_asyncpp.tools.doctor.command",
    "evaluate": "lightning_asyncpp.tools.saved.evaluate",
    "export": "lightning_asyncpp.tools.saved.export",
    "generate": "lightning_asyncpp.tools.saved.generate",
    "import": "lightning_asyncpp.tools.saved.importing",
    "plan": "lightning_asyncpp.tools.plan.plan",
    "prepare": "lightning_asyncpp.tools.prepare.prepare",
    "trace": "lightning_asyncpp.tools.trace.trace",
}

# Optimizers known by the name of their rule for matrices; torch.optim.Muon takes nothing but matrices, and no model.
_WHOLE_MODEL = {"Muon": "MuonAdamW", "NorMuon": "NorMuonAdamW"}

_DESCRIPTION = (
    "Asynchronous pipeline parallelism for PyTorch Lightning. Besides the subcommands below: asyncpp bench"
    " schedule|compute|optimizer|network|time-to-loss|draw measures pipelines; asyncpp plan says what a recipe needs on"
    " a kind of device, and how fast it would be; asyncpp doctor examines the installation, with GPUs or without, and"
    " writes a report; asyncpp check verifies that a pipeline"
    " trains a recipe's model as a single process does; asyncpp ablate trains a grid of optimizers, learning rates,"
    " delays and corrections, and compares them; asyncpp trace shows where the time of a run went that"
    " `asyncpp fit --trace` recorded; asyncpp prepare tokenises documents into shards to train on; asyncpp generate and"
    " asyncpp evaluate let a checkpoint write, and measure it; asyncpp checkpoint info|convert|verify looks into one,"
    " writes it in another form, and says whether it is whole; asyncpp export and asyncpp import exchange models with"
    " Hugging Face transformers."
)


class AsyncppCLI(LightningCLI):
    """LightningCLI that says what is wrong with a recipe, and ends a training with a line on what to look at next."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make the parser of the command or of a subcommand.

        A name cut short would be taken for one that begins so: ``--trainer.max_step`` for ``max_steps``.
        """
        return super().init_parser(**{**kwargs, "allow_abbrev": False})

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make the parser, of the subcommand alone that is asked for: describing all takes four times as long."""
        asked = {name: skipped for name, skipped in self.subcommands().items() if [name] == sys.argv[1:2]}
        if asked:
            self.subcommands = lambda: asked  # type: ignore[method-assign]
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the arguments, recipes and overrides.

        A file that is no text, or has something where jsonargparse expects nothing of the kind, ends as any other
        mistake in them does: with a message.
        """
        required(LightningCLI, "_parse_ckpt_path", "compare the model of a checkpoint with the recipe's")
        self._args = args
        try:
            super().parse_arguments(parser, args)
        except ConfigurationError:
            raise
        except UnicodeDecodeError as error:
            parser.error(f"a file is no text in UTF-8: {error}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            parser.error(f"the arguments or a recipe cannot be read: {type(error).__name__}: {error}")

    def _parse_ckpt_path(self) -> None:
        """Take the model's arguments from the checkpoint.

        Lightning puts them over those of the user without a word, reads all of the file for that, and ends with
        whatever a damaged one is taken for.

        Raises:
            ConfigurationError: it cannot be read, or a training would go on with another model than was asked for.
        """
        if not (subcommand := self.config.get("subcommand")):
            return
        section = self.config[subcommand]
        ckpt_path = section.get("ckpt_path")
        if not (saved := saved_hyper_parameters(ckpt_path, section.get("weights_only"))):
            return
        given, asked = _model_of(self._given_arguments(), subcommand), _model_of(self.config, subcommand)
        merged = self._with_model(model_arguments(saved, given, asked), ckpt_path)
        if problems := list(differences(given, asked, _model_of(merged, subcommand))):
            if subcommand == "fit":
                raise another_model(ckpt_path, problems, "initial_weights" in asked.get("init_args", {}))
            _note(f"the checkpoint's own model is used by {subcommand}:", *problems)
        self.config = merged

    def _given_arguments(self) -> jsonargparse.Namespace:
        """What recipes and command line have, without defaults."""
        is_read = isinstance(self._args, dict | jsonargparse.Namespace)
        parse = self.parser.parse_object if is_read else self.parser.parse_args
        given: jsonargparse.Namespace = parse(self._args, defaults=False)
        return given

    def _with_model(self, arguments: dict[str, Any], ckpt_path: str) -> jsonargparse.Namespace:
        """The configuration with other arguments of the model."""
        section = {self.config["subcommand"]: {"model": arguments}}
        try:
            merged: jsonargparse.Namespace = self.parser.parse_object(section, self.config)
        except SystemExit:
            sys.stderr.write(f"asyncpp: error: the model's arguments above are those of the checkpoint {ckpt_path}\n")
            raise
        return merged

    def instantiate_classes(self) -> None:
        """Make what the recipe asks for.

        Raises:
            ConfigurationError: a class of this package refused its arguments.
            Exception: what another class raised, without jsonargparse's account of all that it tried.
        """
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            cause = _first_cause(error)
            raise (ConfigurationError(str(cause)) if _is_refusal(cause) else cause) from None

    def after_fit(self) -> None:
        """Name the checkpoint and the logs."""
        callback = self.trainer.checkpoint_callback
        checkpoint = getattr(callback, "best_model_path", "") or ("none yet" if callback else "none was configured")
        logs = next((x for x in self.trainer.loggers if isinstance(x, TensorBoardLogger)), None)
        look = f"`tensorboard --logdir {logs.root_dir}` shows the curves" if logs is not None else "no TensorBoard logs"
        _print(f"Done. Checkpoint: {checkpoint}; {look}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: what follows ``asyncpp``; default: those of the process.

    Raises:
        SystemExit: something is wrong with them, or went wrong on another rank; what, stands on the standard error
            output.
    """
    try:
        run(arguments)
    except ConfigurationError as error:
        _refuse(error)
    except PeerLostError as error:
        _give_up(error)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command, in a process that wants to know why it cannot be run.

    Raises:
        ConfigurationError: what was asked for does not fit together.
        SystemExit: it cannot even be read.
    """
    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    _find_own_modules()
    if sys.argv[1:2] and sys.argv[1] in TOOLS:
        importlib.import_module(TOOLS[sys.argv[1]]).main(sys.argv[2:])
        return
    _check_subcommand(sys.argv[1:2])
    sys.argv[1:] = _with_trace(_with_optimizer(sys.argv[1:]))
    make_cli(save_config_kwargs={"overwrite": True})


def _check_subcommand(given: Sequence[str]) -> None:
    """Refuse a missing name, and one that is none; Lightning's parser would not name the tools."""
    known = [*AsyncppCLI.subcommands(), *TOOLS]
    if not given:
        raise ConfigurationError(f"a subcommand is missing; choose one of {', '.join(known)}")
    if not given[0].startswith("-") and given[0] not in known:
        raise ConfigurationError(f"there is no subcommand {given[0]!r}; choose one of {', '.join(known)}")


def _refuse(error: ConfigurationError) -> NoReturn:
    """End with what is wrong; where it was found, among Lightning's frames and on every rank, would hide it."""
    rank = getattr(rank_zero_only, "rank", None) or 0
    text = str(error)
    if rank:  # they all raise the same
        text = f"[rank {rank}] {textwrap.shorten(text, 100, placeholder=' ...')}"
    sys.stderr.write(f"asyncpp: error: {text}\n")  # at once: other ranks write as well
    sys.exit(2)


def _give_up(error: PeerLostError) -> NoReturn:
    """End with what went wrong on another rank; how this one learnt of it would hide that."""
    text = str(error)
    if rank := getattr(rank_zero_only, "rank", None) or 0:
        text = f"[rank {rank}] {text.partition(chr(10))[0]}"
    sys.stderr.write(f"asyncpp: error: {text}\n")
    sys.exit(1)


def _model_of(configuration: jsonargparse.Namespace, subcommand: str) -> dict[str, Any]:
    model = configuration[subcommand].get("model")
    return model.as_dict() if isinstance(model, jsonargparse.Namespace) else {}


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_refusal(error: BaseException) -> bool:
    """Whether a class of this package raised it, itself."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("lightning_asyncpp.")


def read_configuration(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a subcommand as the command does, recipes and overrides; nothing is built.

    Args:
        arguments: what would follow ``asyncpp``: ``["fit", "--config", "recipe.yaml", "--trainer.max_steps", "7"]``.

    Returns:
        The whole configuration of the subcommand, defaults filled in, in plain values.

    Raises:
        SystemExit: something is wrong with them; what, stands on the standard error output.
    """
    before = list(sys.argv)
    sys.argv = ["asyncpp", *_with_trace(_with_optimizer(arguments))]
    _find_own_modules()
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
    limit_yaml()
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return cli(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Each stage builds its own optimizer, after the cut and with the parameters' names.
        auto_configure_optimizers=False,
        parser_kwargs={"description": _DESCRIPTION, "prog": "asyncpp"},
        parser_class=RecipeParser,
        **how,
    )


def _find_own_modules() -> None:
    """Let recipes name classes of the folder that the command is called in, as ``python -m`` does.

    It comes last: what is installed stays what it is.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _with_optimizer(arguments: Sequence[str]) -> list[str]:
    """Let ``--optimizer ...`` stand for the module's argument of that name."""
    short, full = "--optimizer", "--model.init_args.optimizer"
    written_out = []
    value_follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if value_follows:
            written_out.append(_WHOLE_MODEL.get(argument, argument))
            value_follows = False
        elif name == short or name.startswith(f"{short}."):
            written_out.append(full + name[len(short) :] + equals + _WHOLE_MODEL.get(value, value))
            value_follows = not equals
        else:
            written_out.append(argument)
    return written_out


def _with_trace(arguments: Sequence[str]) -> list[str]:
    """Let ``fit --trace [FOLDER]`` and ``--trace.mini_batches N`` stand for a ``PipelineTrace`` among the callbacks."""
    if list(arguments[:1]) != ["fit"]:
        return list(arguments)
    short, full = "--trace", "--trainer.callbacks"
    rest, options = [], []
    left = list(arguments)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name != short and not name.startswith(f"{short}."):
            rest.append(name + equals + value)
            continue
        if not equals and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        argument = name[len(short) :] or ".dirpath"
        options += [f"{full}{argument}{equals}{value}"] if equals or name != short else [""]
    if not options:
        return rest
    # Last, so that no --config takes the place of the list that it is added to.
    return [*rest, f"{full}+=lightning_asyncpp.PipelineTrace", *filter(None, options)]


def _quiet() -> None:
    # Remarks of Lightning on its own internals and on loaders that are as they should be.
    for message in (
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*does not have many workers.*",
        ".*`IterableDataset` has `__len__` defined.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)


@rank_zero_only
def _print(text: Any) -> None:
    print(text, flush=True)


@rank_zero_only
def _note(text: str, *items: str) -> None:
    sys.stderr.write(f"asyncpp: {text}\n" + "".join(f"  - {item}\n" for item in items))
