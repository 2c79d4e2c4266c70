"""Help texts of the command, and suggestions for misspelt names; cheap to import."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a name that does not exist, after a semicolon; empty if no known name is similar.

    Args:
        name: the given name; only the last part of dotted names is compared, with hyphens equal to underscores.
        known: all known names; of equally similar ones the first is suggested.
    """
    ends: dict[str, str] = {}
    for candidate in known:
        ends.setdefault(_end(candidate), candidate)
    nearest = difflib.get_close_matches(_end(name), ends, n=1, cutoff=0.7)
    return f"; did you mean {ends[nearest[0]]}?" if nearest else ""


def _end(name: str) -> str:
    return name.rpartition(".")[2].lower().replace("-", "_")


GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "fit": "train a recipe's model",
        "validate": "measure a checkpoint on the validation data",
        "test": "measure a checkpoint on the test data",
        "predict": "run a checkpoint on the data",
    },
    "before you train": {
        "recipes": "list the recipes that come with the package, or copy one",
        "check": "verify that a pipeline trains a recipe's model as a single process does",
        "plan": "say what a recipe needs on a kind of device, and how fast it would be",
        "prepare": "tokenise documents into shards to train on",
        "doctor": "examine the installation, with GPUs or without",
    },
    "look": {
        "trace": "show where the time of a run went that `asyncpp fit --trace` recorded",
    },
    "models in and out": {
        "export": "write a model as a folder of Hugging Face transformers",
        "import": "read such a folder: its config, and its weights as a checkpoint",
        "generate": "let a checkpoint write",
        "checkpoint": "look into one (info), write it in another form (convert)",
    },
}
"""Titles, mapped to subcommands and their descriptions."""
SUBCOMMANDS = GROUPS["train"]
"""Subcommands of LightningCLI."""
FULL_HELP = "--help=full"
"""Option that lists all options of LightningCLI."""

_USAGE = """\
usage: asyncpp COMMAND ...

Asynchronous pipeline parallelism for PyTorch Lightning.
"""
_FIRST_STEPS = """\
`asyncpp COMMAND --help` says what a command takes. To begin with:
  asyncpp recipes
  asyncpp check quickstart
  asyncpp fit quickstart
"""

_TRAINING = """\
usage: asyncpp {name} RECIPE [--KEY VALUE ...]

{does}. A recipe is a YAML file; --config RECIPE names it, too, and further ones change the first.

Arguments override the values of the recipe; the last one wins:
  --trainer.max_steps 100             any argument of Lightning's Trainer
  --trainer.strategy async_pipeline   or sync_pipeline, delayed_gradient, or one of Lightning's
  --trainer.strategy.microbatches 8  any argument of the strategy
  --model.config.num_layers 12        any argument of the model's class; --model CLASS takes another
  --data.batch_size 32                any argument of the data's class; --data CLASS takes another
  --optimizer AdamW                   class of the optimizer; --optimizer.lr 0.001 is one of its arguments
  --seed_everything 42                seed of weights, data order and dropout
  --ckpt_path CKPT                    {checkpoint}
{trace}
To see more:
  --print_config                      the recipe with all that overrides it and all defaults, and nothing else
  --model.help CLASS                  arguments of a class; as well --data.help, --trainer.strategy.help, ...
  --help=full                         all options (some hundred)

Examples:
{examples}"""
_TRACE = """\
  --trace [FOLDER]                    record where the time goes, for `asyncpp trace`; --trace.mini_batches N: how long
"""
_FIT_EXAMPLES = """\
  asyncpp fit quickstart
  asyncpp fit quickstart --trainer.max_steps 100 --optimizer AdamW --optimizer.lr 0.001 --trace
  asyncpp fit quickstart --trainer.devices 4 --trainer.strategy.microbatches 8
  torchrun --nproc-per-node 2 -m lightning_asyncpp fit quickstart
"""
_OTHER_EXAMPLE = "  asyncpp {name} quickstart --ckpt_path last.ckpt\n"


def overview() -> str:
    """Return the help of the command: its subcommands in groups, a line each."""
    blocks = [
        "\n".join([f"{title}:", *(f"  {name:<12}{text}" for name, text in commands.items())])
        for title, commands in GROUPS.items()
    ]
    return "\n".join([_USAGE, *(f"{block}\n" for block in blocks), _FIRST_STEPS])


def help_of(name: str) -> str:
    """Return the help of a subcommand of LightningCLI, without the options that Lightning finds."""
    is_fit = name == "fit"
    does = SUBCOMMANDS[name]
    return _TRAINING.format(
        name=name,
        does=does[0].upper() + does[1:],
        checkpoint="a checkpoint to go on from" if is_fit else "the checkpoint",
        trace=_TRACE if is_fit else "",
        examples=_FIT_EXAMPLES if is_fit else _OTHER_EXAMPLE.format(name=name),
    )
