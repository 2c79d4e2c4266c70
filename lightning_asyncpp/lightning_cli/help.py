"""Help texts of the command, and suggestions for misspelt names; cheap to import."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean NAME?"`` for a name that does not exist; empty if no known name is similar.

    Args:
        name: the given name. Only the last part of dotted names is compared; hyphens equal underscores.
        known: all known names. Of several names with the same last part, only the first can be suggested.
    """
    ends: dict[str, str] = {}
    for candidate in known:
        ends.setdefault(_end(candidate), candidate)
    nearest = difflib.get_close_matches(_end(name), ends, n=1, cutoff=0.65)
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
        "plan": "estimate a recipe's memory and speed on a kind of device",
        "prepare": "tokenise documents into shards to train on",
        "doctor": "report versions and devices, and test training with two stages",
    },
    "look": {
        "trace": "show how a run spent its time, recorded by `asyncpp fit --trace`",
    },
    "models in and out": {
        "export": "write a model as a folder that Hugging Face transformers loads",
        "import": "read a folder of Hugging Face transformers",
        "generate": "continue a prompt with a trained model",
        "checkpoint": "describe a checkpoint (info), or write it in another form (convert)",
    },
}
"""Title -> subcommand -> its description."""
SUBCOMMANDS = GROUPS["train"]
"""Subcommands of LightningCLI."""
FULL_HELP = "--help=full"
"""Option that lists all options of LightningCLI."""

_USAGE = """\
usage: asyncpp COMMAND ...

Asynchronous pipeline parallelism for PyTorch Lightning.
"""
_FIRST_STEPS = """\
`asyncpp COMMAND --help` lists the arguments of a command. First steps:
  asyncpp recipes
  asyncpp check quickstart
  asyncpp fit quickstart
"""

_TRAINING = """\
usage: asyncpp {name} RECIPE [--KEY VALUE ...]

{does}. A recipe is a YAML file, also given as --config RECIPE; a second recipe overrides the first.

Arguments override the values of the recipe; the last one wins:
  --trainer.max_steps 100             any argument of Lightning's Trainer
  --trainer.strategy async_pipeline   or sync_pipeline, delayed_gradient, or one of Lightning's
  --trainer.strategy.microbatches 8  any argument of the strategy
  --model.config.num_layers 12        any argument of the model's class; --model CLASS changes the class
  --data.batch_size 32                any argument of the data's class; --data CLASS changes the class
  --optimizer AdamW                   class of the optimizer; --optimizer.lr 0.001 is one of its arguments
  --seed_everything 42                seed of weights, data order and dropout
  --ckpt_path CKPT                    {checkpoint}
{trace}
To see more:
  --print_config                      print the recipe with overrides and defaults, without running it
  --model.help CLASS                  arguments of a class; also --data.help, --trainer.strategy.help, ...
  --help=full                         all options (a long list)

Examples:
{examples}"""
_TRACE = """\
  --trace [FOLDER]                    record a trace for `asyncpp trace`; --trace.mini_batches N limits it
"""
_FIT_EXAMPLES = """\
  asyncpp fit quickstart
  asyncpp fit quickstart --trainer.max_steps 100 --optimizer AdamW --optimizer.lr 0.001 --trace
  asyncpp fit quickstart --trainer.devices 4 --trainer.strategy.microbatches 8
  torchrun --nproc-per-node 2 -m lightning_asyncpp fit quickstart
"""
_OTHER_EXAMPLE = "  asyncpp {name} quickstart --ckpt_path last.ckpt\n"


def overview() -> str:
    """Return the help of the command, with one line per subcommand."""
    blocks = [
        "\n".join([f"{title}:", *(f"  {name:<12}{text}" for name, text in commands.items())])
        for title, commands in GROUPS.items()
    ]
    return "\n".join([_USAGE, *(f"{block}\n" for block in blocks), _FIRST_STEPS])


def help_of(name: str) -> str:
    """Return a short help of a subcommand of LightningCLI, without the list of all options."""
    is_fit = name == "fit"
    does = SUBCOMMANDS[name]
    return _TRAINING.format(
        name=name,
        does=does[0].upper() + does[1:],
        checkpoint="a checkpoint to go on from" if is_fit else "the checkpoint",
        trace=_TRACE if is_fit else "",
        examples=_FIT_EXAMPLES if is_fit else _OTHER_EXAMPLE.format(name=name),
    )
