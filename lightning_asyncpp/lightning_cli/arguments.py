"""What stands for other arguments, or goes before them, until LightningCLI reads them; nothing heavy is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning_asyncpp.lightning_cli.recipe_names import with_recipe_paths

DESCRIPTION = (
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
"""Of the command, for its help."""
SUBCOMMANDS = {
    "fit": "Runs the full optimization routine.",
    "validate": "Perform one evaluation epoch over the validation set.",
    "test": "Perform one evaluation epoch over the test set.",
    "predict": "Run inference on your data.",
}
"""LightningCLI's own, and what its help says of them."""

# Optimizers known by the name of their rule for matrices; torch.optim.Muon takes nothing but matrices, and no model.
_WHOLE_MODEL = {"Muon": "MuonAdamW", "NorMuon": "NorMuonAdamW"}


def find_own_modules() -> None:
    """Let recipes name classes of the folder that the command is called in, as ``python -m`` does.

    It comes last: what is installed stays what it is.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def written_out(arguments: Sequence[str]) -> list[str]:
    """The arguments of a subcommand of LightningCLI, without this command's shorthands.

    Raises:
        ConfigurationError: there is no recipe that they name.
    """
    return with_recipe_paths(with_trace(_with_optimizer(arguments)))


def _with_optimizer(arguments: Sequence[str]) -> list[str]:
    """Let ``--optimizer ...`` stand for the module's argument of that name."""
    short, full = "--optimizer", "--model.init_args.optimizer"
    replaced = []
    value_follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if value_follows:
            replaced.append(_WHOLE_MODEL.get(argument, argument))
            value_follows = False
        elif name == short or name.startswith(f"{short}."):
            replaced.append(full + name[len(short) :] + equals + _WHOLE_MODEL.get(value, value))
            value_follows = not equals
        else:
            replaced.append(argument)
    return replaced


def with_trace(arguments: Sequence[str]) -> list[str]:
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
